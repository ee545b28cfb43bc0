"""The history of the node: what devices and jobs used in the last 24 hours, in at most 16 MiB.

`points` reads the rows of devices and jobs from a snapshot, `point_table` keeps rows in SQLite within the budget,
`history` answers queries, and `history_file` keeps the rows over a restart.
"""
