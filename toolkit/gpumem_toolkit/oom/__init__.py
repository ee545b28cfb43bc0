"""Observes and explains out-of-memory errors, and derives advice.

Other folders import: `diagnosis`, `guard`.
"""
