"""Orphans: idle processes that their launcher, server or container has left behind."""
