"""Memory profiles of processes: read from reporters, checked, kept in memory or in files, and shown in several formats.

Other folders import: `profile_document`.
"""
