"""Work beside requests: housekeeping, the detection of ended processes, policies, reload on SIGHUP."""
