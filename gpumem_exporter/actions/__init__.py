"""Actions on processes: requests, their delivery to reporters, their results, and policies that request them.

Other folders import: `caller`, `declarations`, `dispatcher`, `engine_starts`, `engines`, `lifecycle`, `model`,
`rate_limits`, `selection`, `terminate`, `timing`.
"""
