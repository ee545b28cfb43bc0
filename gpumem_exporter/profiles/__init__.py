"""Memory profiles of processes: what people see of them.

Other folders import: `formats`.
"""
