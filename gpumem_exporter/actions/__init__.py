"""Actions on processes: requests, their delivery to reporters, their results, and policies that request them.

Other folders import: `action_events`, `action_routes`, `audit`, `declarations`, `dispatcher`, `engine_starts`,
`engines`, `kinds`, `lifecycle`, `model`, `nvml_route`, `rate_limits`, `selection`, `sentences`, `terminate`,
`timing`.
"""
