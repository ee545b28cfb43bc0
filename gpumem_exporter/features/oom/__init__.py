"""Out-of-memory errors: converted from reports, each once, to events and log lines.

Other folders import: `oom_events`.
"""
