"""`GET /docs`: the description of the API in Swagger UI, from the files of the package fastapi-swagger.

Nothing is loaded from another host. The page sends no request to the API: an action needs a deliberate client.
"""

from __future__ import annotations

import base64
import hashlib
from html import escape

from fastapi import APIRouter, HTTPException
from fastapi.responses import FileResponse, HTMLResponse

__all__ = ["api_page_router"]

_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
_START = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#api", supportedSubmitMethods: []})'
_PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gpumem-exporter API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="api"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{escape(_START, quote=False)}</script>
</html>
"""
_HEADERS = {
    # Swagger UI sets style attributes, and has its icons in data URLs.
    "Content-Security-Policy": (
        "default-src 'none'; connect-src 'self'; img-src data:; style-src 'self' 'unsafe-inline'; script-src 'self' "
        f"'sha256-{base64.b64encode(hashlib.sha256(_START.encode()).digest()).decode()}'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
}


def api_page_router() -> APIRouter:
    """Return the routes of the page and its two files."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def page() -> HTMLResponse:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    @router.get("/docs/{name}")
    async def file(name: str) -> FileResponse:
        if name not in _FILES:
            raise HTTPException(404)
        from importlib.resources import files  # as in page.py: an exporter without a viewer does not need it

        return FileResponse(str(files("fastapi_swagger.resources").joinpath(name)), media_type=_FILES[name])

    return router
