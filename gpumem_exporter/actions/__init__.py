"""Actions on processes: requests, their delivery to reporters, and their results.

Other folders import: `action`, `action_options`, `action_routes`, `audit`, `dispatcher`, `engines`,
`kinds`, `lifecycle`, `nvml_route`, `rate_limits`, `results`, `selection`, `sentences`, `terminate`, `timing`.
"""
