"""`GET /`: the live page, one document with its style and its script.

The page loads nothing else. Its Content-Security-Policy allows the style and the script by their hashes, requests to
the exporter's own API, and nothing more.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape

from fastapi import APIRouter, Request, Response

from gpumem_exporter.server.http.replies import accepts_gzip

__all__ = ["SCRIPTS", "STYLES", "Page", "page_router"]

STYLES = ("theme.css", "layout.css", "devices.css", "processes.css", "dialog.css")
SCRIPTS = (
    "format.js",
    "ledger.js",
    "history.js",
    "access.js",
    "warnings.js",
    "devices.js",
    "processes.js",
    "events.js",
    "clear.js",
    "connection.js",
    "main.js",
)
"""Joined in this order into one module: each script may use the names of those before it."""


@dataclass(frozen=True)
class Page:
    """The page of one exporter. Its files are read at the first request.

    Args:
        version: the exporter's version.
        demo: whether the devices are simulated.
        telemetry_path: the path of the metrics.
    """

    version: str
    demo: bool
    telemetry_path: str

    @cached_property
    def body(self) -> bytes:
        """The page as HTML."""
        return self._without_digest.replace("<!--page-->", self.digest).encode()

    @cached_property
    def compressed(self) -> bytes:
        """The body compressed with gzip."""
        return gzip.compress(self.body, mtime=0)

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """The headers of the reply."""
        policy = {
            "default-src": "'none'",
            "script-src": _hash(self._script),
            "style-src": _hash(self._style),
            "connect-src": "'self'",
            "img-src": "data:",
            "base-uri": "'none'",
            "form-action": "'none'",
            "frame-ancestors": "'none'",
            "require-trusted-types-for": "'script'",
            "trusted-types": "'none'",
        }
        return {
            "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in policy.items()),
            "Permissions-Policy": "camera=(), geolocation=(), microphone=()",
            "Cache-Control": "no-cache",
            "ETag": f'W/"{self.digest}"',
            "Vary": "Accept-Encoding",
        }

    @cached_property
    def digest(self) -> str:
        """Identifies the page: an open page with another digest than the exporter's reloads itself."""
        return hashlib.sha256(self._without_digest.encode()).hexdigest()[:16]

    @cached_property
    def _without_digest(self) -> str:
        page = _read("index.html")
        parts = {
            "version": escape(self.version),
            "telemetry-path": escape(self.telemetry_path),
            "title": "GPU memory (demo)" if self.demo else "GPU memory",
            "demo": _read("demo.html") if self.demo else "",
            "style": self._style,
            "script": self._script,
        }
        for name, text in parts.items():
            page = page.replace(f"<!--{name}-->", text)
        return page

    @cached_property
    def _style(self) -> str:
        return "".join(_read(name) for name in STYLES)

    @cached_property
    def _script(self) -> str:
        return "".join(_read(name) for name in SCRIPTS)


def page_router(page: Page) -> APIRouter:
    """Return the route of the page."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def show(request: Request) -> Response:
        if request.headers.get("if-none-match") == page.headers["ETag"]:
            return Response(status_code=304, headers=page.headers)
        if accepts_gzip(request.headers.get("accept-encoding", "")):
            headers = {**page.headers, "Content-Encoding": "gzip"}
            return Response(page.compressed, headers=headers, media_type="text/html")
        return Response(page.body, headers=page.headers, media_type="text/html")

    return router


def _read(name: str) -> str:
    from importlib.resources import files  # costs 0.5 MB, which an exporter without a viewer does not need

    return files("gpumem_exporter.server.web").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
