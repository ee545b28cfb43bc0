"""The HTTP edge: listeners, the server with its limits, who is on the other side, what may pass, and TLS.

Other folders import: `connections`, `fair_queue`, `listeners`, `peer`, `problems`, `replies`,
`request_guard`, `uvicorn_server`, `watched_files`, `web_access`, `web_config`.
"""
