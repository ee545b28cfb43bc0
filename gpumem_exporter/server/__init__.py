"""The exporter's HTTP server and its composition root. Only here: fastapi, pydantic, uvicorn.

Other folders import: `serve`, `settings`.
"""
