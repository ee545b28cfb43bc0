"""Memory profiles: which code and which objects hold the allocated bytes.

Other folders import: `aggregate`, `encoded`, `heap_blocks`, `heap_reader`, `oom_moment`, `profile_types`,
`profiler`, `recorder`.
"""
