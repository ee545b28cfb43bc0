"""What people see: jobs, findings and words, computed once for page, terminal and commands; and the live page itself.

Other folders import: `documents`, `findings`, `health`, `job_document`, `jobs`, `live`, `oom`, `page_routes`,
`runbooks`, `state_routes`, `words`.
"""
