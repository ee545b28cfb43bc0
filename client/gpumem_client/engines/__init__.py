"""Inference engines in this process: what their objects show about their memory, their cache and their requests.

Nothing here imports an engine, calls CUDA, takes a lock or changes an object of an engine. What an engine's version
does not have is absent. docs/engines.md lists what is read.

Other folders import: `facts`, `reader`, `state`.
"""
