"""Memory profiles: which code and which objects hold the allocated bytes.

Other folders import: `aggregate`, `blocks`, `encoded`, `heap_reader`, `latest`, `model`, `oom_moment`,
`profiler`, `recorder`.
"""
