"""`GET /`: the live page. `GET /docs`: the description of the API in Swagger UI. Neither loads anything from elsewhere.

The live page is one document and its modules, styles and chart library, which have the page's digest in their paths: a
browser keeps them, and never mixes two versions. All of its addresses are relative, so it works behind a path prefix.
`.ci/fetch-libraries` fetches the library again.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import FileResponse, HTMLResponse

from gpumem_exporter.edge.replies import accepts_gzip

_DEMO = '<p class="demo">Demo<span>: simulated devices and jobs</span></p>'
_TYPES = {"css": "text/css", "js": "text/javascript"}


def source_hash(text: str) -> str:
    """Return the source of a script or a style in the page itself, for its content policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def content_policy(**directives: str) -> dict[str, str]:
    """Return the header that allows a page only these sources."""
    allowed = {"base-uri": "'none'", "form-action": "'none'", "frame-ancestors": "'none'", "default-src": "'none'"}
    allowed |= {name.replace("_", "-"): value for name, value in directives.items()}
    return {"Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in allowed.items())}


@dataclass(frozen=True)
class Page:
    """The live page of one exporter. Its files are read at the first request."""

    version: str
    demo: bool
    """Whether the devices are simulated."""
    telemetry_path: str
    """The path of the metrics."""

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The styles, scripts and the library that index.html names, compressed with gzip."""
        names = re.findall(r'"page/<!--page-->/([\w./]+)"', self._without_digest)
        return {name: gzip.compress(static(name).encode(), mtime=0) for name in dict.fromkeys(names)}

    @cached_property
    def digest(self) -> str:
        """Identifies the page: an open page with another digest than the exporter's reloads itself."""
        return hashlib.sha256(b"".join((self._without_digest.encode(), *self.files.values()))).hexdigest()[:16]

    @cached_property
    def compressed(self) -> bytes:
        """The page as HTML, compressed with gzip."""
        return gzip.compress(self._without_digest.replace("<!--page-->", self.digest).encode(), mtime=0)

    @cached_property
    def headers(self) -> dict[str, str]:
        """The headers of the reply."""
        return {
            **content_policy(
                script_src="'self'",
                style_src="'self'",
                connect_src="'self'",
                img_src="data:",
                require_trusted_types_for="'script'",
                trusted_types="'none'",
            ),
            "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
            "Cache-Control": "no-cache",
            "ETag": f'W/"{self.digest}"',
        }

    @cached_property
    def _without_digest(self) -> str:
        page = static("index.html")
        parts = {
            "version": escape(self.version),
            "telemetry-path": escape(self.telemetry_path),
            "telemetry-link": escape(self.telemetry_path.lstrip("/")),
            "title": "GPU memory (demo)" if self.demo else "GPU memory",
            "demo": _DEMO if self.demo else "",
        }
        for name, text in parts.items():
            page = page.replace(f"<!--{name}-->", text)
        return page


_API_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
# An action needs a deliberate client: the page sends no request to the API.
_API_SCRIPT = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#api", supportedSubmitMethods: []})'
_API_HEADERS = content_policy(
    script_src=f"'self' {source_hash(_API_SCRIPT)}",
    style_src="'self' 'unsafe-inline'",  # Swagger UI sets style attributes
    connect_src="'self'",
    img_src="data:",
)


def page_router(page: Page) -> APIRouter:
    """Return the routes of both pages."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == page.headers["ETag"]:
            return Response(status_code=304, headers=page.headers)
        return _reply(request, page.compressed, page.headers, "text/html")

    @router.get("/page/{digest}/{name:path}")
    async def file(request: Request, digest: str, name: str) -> Response:
        if digest != page.digest or name not in page.files:
            raise HTTPException(404)
        headers = {"Cache-Control": "public, max-age=31536000, immutable"}
        return _reply(request, page.files[name], headers, _TYPES[name.rpartition(".")[2]])

    @router.get("/docs")
    async def api_page() -> HTMLResponse:
        page = static("api.html").replace("<!--script-->", escape(_API_SCRIPT, quote=False))
        return HTMLResponse(page, headers=_API_HEADERS)

    @router.get("/docs/{name}")
    async def api_file(name: str) -> FileResponse:
        if name not in _API_FILES:
            raise HTTPException(404)
        from importlib.resources import files  # see `static`

        return FileResponse(str(files("fastapi_swagger.resources").joinpath(name)), media_type=_API_FILES[name])

    return router


def _reply(request: Request, compressed: bytes, headers: Mapping[str, str], media_type: str) -> Response:
    headers = {**headers, "Vary": "Accept-Encoding"}
    if accepts_gzip(request.headers.get("accept-encoding", "")):
        return Response(compressed, headers={**headers, "Content-Encoding": "gzip"}, media_type=media_type)
    return Response(gzip.decompress(compressed), headers=headers, media_type=media_type)


def static(name: str) -> str:
    """Return the text of a static file."""
    from importlib.resources import files  # costs 0.5 MB, which an exporter without a viewer does not need

    return files("gpumem_exporter.page").joinpath("static", name).read_text(encoding="utf-8")
