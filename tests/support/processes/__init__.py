"""Processes of tests: programs, other users and namespaces, terminals, a browser."""
