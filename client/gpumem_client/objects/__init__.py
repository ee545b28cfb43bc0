"""Python's objects: what the garbage collector tracks or `gc.freeze()` hides, what refers to them, and their tensors.

Other folders import: `holders`, `referrers`, `tensors`, `tracked`.
"""
