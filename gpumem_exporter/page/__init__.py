"""What people see: jobs, findings and words, computed once for page, terminal and commands; and the live page itself.

Other folders import: `documents`, `engine_words`, `findings`, `health`, `jobs`, `live`, `live_route`, `oom`,
`page_routes`, `runbooks`, `state_routes`.
"""
