"""Inference engines in this process: what their objects show about their memory, their cache and their requests.

Nothing here imports an engine, calls CUDA or takes a lock, and only `sleep` changes an object of an engine, on request.
What an engine's version does not have is absent. docs/engines.md lists what is read.

Other folders import: `engine_reader`, `engine_state`, `sleep`.
"""
