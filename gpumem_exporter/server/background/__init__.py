"""What runs beside requests: housekeeping, liveness of processes, policies, reload on SIGHUP."""
