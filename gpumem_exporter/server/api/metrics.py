"""`GET /metrics`: the page in the form that the scraper asks for."""

from __future__ import annotations

import asyncio
import zlib

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpumem_exporter.collectors.exposition import CONTENT_TYPE_OPENMETRICS, CONTENT_TYPE_TEXT
from gpumem_exporter.server.http.problems import problem_response
from gpumem_exporter.server.http.replies import accepts_gzip, prefers_openmetrics
from gpumem_exporter.server.runtime import Runtime

__all__ = ["MetricsRoute"]

_INLINE_GZIP_BYTES = 64 << 10
"""Up to here compressing takes less time than asking a thread to."""
_GZIP_LEVEL = 1
"""Nine per cent of the page's size; level 9 would make it seven, and take eight times as long."""


class MetricsRoute:
    """Answers scrapes from what is known already: neither the driver nor a process is asked anything.

    Args:
        runtime: the exporter's parts.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one scrape."""
        if scope["method"] != "GET":
            response = problem_response(405, "metrics are read with GET", headers={"Allow": "GET, HEAD"})
            await response(scope, receive, send)
            return
        accept, encodings = _accept_headers(scope)
        openmetrics = prefers_openmetrics(accept)
        page = self._runtime.exposition.render(self._runtime.snapshot(), openmetrics=openmetrics)
        headers = {
            "Content-Type": CONTENT_TYPE_OPENMETRICS if openmetrics else CONTENT_TYPE_TEXT,
            "Vary": "Accept, Accept-Encoding",
            "Cache-Control": "no-store",
        }
        if accepts_gzip(encodings):
            headers["Content-Encoding"] = "gzip"
            if len(page) <= _INLINE_GZIP_BYTES:
                page = _gzip(page)
            else:
                page = await asyncio.to_thread(_gzip, page)  # zlib lets go of the GIL
        await Response(page, headers=headers)(scope, receive, send)


def _accept_headers(scope: Scope) -> tuple[str, str]:
    accept, encodings = [], []
    for name, value in scope["headers"]:
        if name == b"accept":
            accept.append(value.decode("latin-1"))
        elif name == b"accept-encoding":
            encodings.append(value.decode("latin-1"))
    return ",".join(accept), ",".join(encodings)


def _gzip(page: bytes) -> bytes:
    compressor = zlib.compressobj(_GZIP_LEVEL, zlib.DEFLATED, 16 + zlib.MAX_WBITS)
    return compressor.compress(page) + compressor.flush()
