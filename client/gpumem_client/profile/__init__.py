"""Memory profiles: which code and which objects hold the allocated bytes.

Other folders import: `aggregate`, `heap_blocks`, `heap_reader`, `profile_types`, `profiler`, `recorder`.
"""
