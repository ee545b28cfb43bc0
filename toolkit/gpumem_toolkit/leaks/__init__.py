"""Leak detection: growth from step to step, live tensors, and the objects that refer to them.

Other folders import: `detector`, `interpreter_objects`, `live_tensors`, `referrers`, `trend`.
"""
