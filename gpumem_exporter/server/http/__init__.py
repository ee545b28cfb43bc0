"""HTTP: listeners, the server with its limits, content negotiation, problem documents.

Other folders import: `connections`, `listeners`, `peer`, `problems`, `replies`, `turns`, `uvicorn_server`.
"""
