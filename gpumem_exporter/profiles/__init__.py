"""Memory profiles of processes, as reporters send them: read, checked, and kept in memory or in files.

Other folders import: `document`, `model`, `store`.
"""
