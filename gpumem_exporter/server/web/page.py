"""The live page, put together from its parts in `page/`: one document with its style and its script in it.

There is nothing else to load, so the policy that goes with it allows these two by their hashes, the exporter's own API
to be asked, and nothing more.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from html import escape

__all__ = ["SCRIPTS", "STYLES", "Page"]

STYLES = ("theme.css", "layout.css", "devices.css", "processes.css", "dialog.css")
SCRIPTS = (
    "format.js",
    "ledger.js",
    "history.js",
    "access.js",
    "troubles.js",
    "devices.js",
    "processes.js",
    "events.js",
    "clear.js",
    "connection.js",
    "main.js",
)
"""One after the other, in one module: each may use what stands in those before it."""


@dataclass(frozen=True)
class Page:
    """The page of one exporter, read once it is asked for.

    Args:
        version: the exporter's.
        demo: its devices are simulated.
        telemetry_path: where its metrics are.
    """

    version: str
    demo: bool
    telemetry_path: str

    @cached_property
    def body(self) -> bytes:
        """HTML."""
        return self._without_digest.replace("<!--page-->", self.digest).encode()

    @cached_property
    def compressed(self) -> bytes:
        """The same with gzip."""
        import gzip

        return gzip.compress(self.body, mtime=0)

    @cached_property
    def headers(self) -> Mapping[str, str]:
        """What the browser must know of it."""
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
        """Tells one page from another: an open page that is not the exporter's any more loads itself anew."""
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


def _read(name: str) -> str:
    from importlib.resources import files  # half a megabyte that an exporter at which nobody looks does not need

    return files("gpumem_exporter.server.web").joinpath("static", name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
