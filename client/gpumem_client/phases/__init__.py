"""Phases and peaks: what the memory of a process was at most, by phase and component.

Other folders import: `block_contexts`, `measured_block`, `observed`, `peaks`.
"""
