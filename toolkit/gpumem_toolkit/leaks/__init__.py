"""Leak detection: growth from step to step, live tensors, and the objects that refer to them.

Other folders import: `detector`, `live_tensors`, `suspects`, `trend`.
"""
