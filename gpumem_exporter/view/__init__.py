"""What people see: jobs, findings, words and sentences, computed once for page, terminal and commands. Pure.

Other folders import: `documents`, `engines`, `jobs`, `live`, `oom`, `sentences`.
"""
