"""Actions on processes: requests, their delivery to reporters, and their results.

Other folders import: `action_events`, `action_routes`, `audit`, `declarations`, `dispatcher`, `engine_starts`,
`engines`, `kinds`, `lifecycle`, `model`, `nvml_route`, `rate_limits`, `selection`, `sentences`, `terminate`,
`timing`.
"""
