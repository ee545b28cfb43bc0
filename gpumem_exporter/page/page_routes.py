"""`GET /`: the live page. `GET /docs`: the description of the API in Swagger UI. Neither loads anything from elsewhere.

The live page is one document and its modules, styles and chart library, which have the page's digest in their paths: a
browser keeps them, and never mixes two versions. All of its addresses are relative, so it works behind a path prefix.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from html import escape

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.responses import FileResponse, HTMLResponse

from gpumem_exporter.edge.replies import accepts_gzip

STYLES = ("uplot/uPlot.min.css", "theme.css", "node.css", "jobs.css", "detail.css")
LIBRARY = "uplot/uPlot.iife.min.js"
"""The chart library as it is published; `.ci/fetch-libraries` fetches it again."""
SCRIPTS = (
    *("main.js", "route.js", "connection.js", "api.js", "dom.js", "format.js", "hues.js", "findings.js", "devices.js"),
    *("jobs.js", "dialog.js", "actions.js", "events.js", "detail.js", "processes.js", "profiles.js", "oom.js"),
    "timeline.js",
)
"""The modules; the first one starts the page."""

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
    def body(self) -> bytes:
        """The page as HTML."""
        return self._without_digest.replace("<!--page-->", self.digest).encode()

    @cached_property
    def compressed(self) -> bytes:
        """The body compressed with gzip."""
        return gzip.compress(self.body, mtime=0)

    @cached_property
    def files(self) -> dict[str, bytes]:
        """The styles and scripts by name, compressed with gzip."""
        return {name: gzip.compress(text.encode(), mtime=0) for name, text in self._texts.items()}

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
            "Vary": "Accept-Encoding",
        }

    @cached_property
    def digest(self) -> str:
        """Identifies the page: an open page with another digest than the exporter's reloads itself."""
        content = "".join((self._without_digest, *self._texts.values()))
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {name.rpartition("/")[2]: _read(name) for name in (*STYLES, LIBRARY, *SCRIPTS)}

    @cached_property
    def _without_digest(self) -> str:
        page = _read("index.html")
        parts = {
            "version": escape(self.version),
            "telemetry-path": escape(self.telemetry_path),
            "telemetry-link": escape(self.telemetry_path.lstrip("/")),
            "title": "GPU memory (demo)" if self.demo else "GPU memory",
            "demo": _DEMO if self.demo else "",
            "links": "\n".join(_links()),
        }
        for name, text in parts.items():
            page = page.replace(f"<!--{name}-->", text)
        return page


def _links() -> Iterator[str]:
    """Yield the elements that load the files, all of them at once."""
    paths = {name: f"page/<!--page-->/{name.rpartition('/')[2]}" for name in (*STYLES, LIBRARY, *SCRIPTS)}
    yield from (f'<link rel="stylesheet" href="{paths[name]}">' for name in STYLES)
    yield from (f'<link rel="modulepreload" href="{paths[name]}">' for name in SCRIPTS[1:])
    yield f'<script defer src="{paths[LIBRARY]}"></script>'
    yield f'<script type="module" src="{paths[SCRIPTS[0]]}"></script>'


_API_FILES = {"swagger-ui-bundle.js": "text/javascript", "swagger-ui.css": "text/css"}
# An action needs a deliberate client: the page sends no request to the API.
_API_SCRIPT = 'SwaggerUIBundle({url: "openapi.json", dom_id: "#api", supportedSubmitMethods: []})'
_API_PAGE = f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>gpumem-exporter API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<div id="api"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script>{escape(_API_SCRIPT, quote=False)}</script>
</html>
"""
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
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            headers = {**page.headers, "Content-Encoding": "gzip"}
            return Response(page.compressed, headers=headers, media_type="text/html")
        return Response(page.body, headers=page.headers, media_type="text/html")

    @router.get("/page/{digest}/{name}")
    async def file(request: Request, digest: str, name: str) -> Response:
        if digest != page.digest or name not in page.files:
            raise HTTPException(404)
        headers = {"Cache-Control": "public, max-age=31536000, immutable", "Vary": "Accept-Encoding"}
        body = page.files[name]
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            headers["Content-Encoding"] = "gzip"
        else:
            body = gzip.decompress(body)
        return Response(body, headers=headers, media_type=_TYPES[name.rpartition(".")[2]])

    @router.get("/docs")
    async def api_page() -> HTMLResponse:
        return HTMLResponse(_API_PAGE, headers=_API_HEADERS)

    @router.get("/docs/{name}")
    async def api_file(name: str) -> FileResponse:
        if name not in _API_FILES:
            raise HTTPException(404)
        from importlib.resources import files  # see _read

        return FileResponse(str(files("fastapi_swagger.resources").joinpath(name)), media_type=_API_FILES[name])

    return router


def _read(name: str) -> str:
    from importlib.resources import files  # costs 0.5 MB, which an exporter without a viewer does not need

    return files("gpumem_exporter.page").joinpath("static", name).read_text(encoding="utf-8")
