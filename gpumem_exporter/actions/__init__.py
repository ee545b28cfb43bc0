"""Actions on processes: requests, their delivery to reporters, their results, and policies that request them.

Other folders import: `caller`, `dispatcher`, `engine_starts`, `engines`, `group`, `lifecycle`, `model`,
`rate_limits`, `request`, `selection`, `suggestion`, `terminate`.
"""
