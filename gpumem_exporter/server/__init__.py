"""The exporter's HTTP server and its composition root.

Only here and in `webhook`: fastapi, pydantic, uvicorn.

Other folders import: `logs`, `serve`, `settings`.
"""
