"""The history of the node: what devices and jobs used in the last 24 hours, in at most 16 MiB.

`points` reads the rows of devices and jobs from a snapshot, `history` keeps them in SQLite within the budget,
`history_route` answers queries, and `history_file` keeps the rows over a restart.
"""
