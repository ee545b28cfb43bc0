"""Speaks with vLLM over HTTP.

The exporter connects only to a port of loopback on which, according to the kernel, the engine's own process listens, or
its parent of the same user in the same place. Every exchange has a time limit and a size limit, and no redirect is
followed.
"""
