"""Memory profiles of processes: read from reporters, checked, kept, and shown in several formats."""
