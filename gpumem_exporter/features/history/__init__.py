"""The history of the node: what devices and jobs used in the last 24 hours, in at most 16 MiB.

`series` has the values of one device or job, `points` reads them from a snapshot, `minima` has what each process keeps,
`history` keeps all of it within the budget and answers queries, `file` keeps it over a restart, and `recorder` has the
threads.
"""
