"""Memory profiles of processes: read from reporters, checked, kept in memory or in files, and shown in several formats.

Other folders import: `diff`, `document`, `formats`, `lines`, `model`, `page`, `saved`, `store`.
"""
