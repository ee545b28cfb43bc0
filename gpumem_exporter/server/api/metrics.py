"""`GET /metrics`: the page in the format and encoding that the scraper accepts."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gpumem_exporter.collectors.exposition import CONTENT_TYPE_OPENMETRICS, CONTENT_TYPE_TEXT, Exposition
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.http.replies import accepts_gzip, prefers_openmetrics

__all__ = ["MetricsRoute"]

_INLINE_GZIP_BYTES = 64 << 10
"""The largest page that the event loop compresses itself, because a thread would take longer to start."""
_GZIP_LEVEL = 1
"""Compresses a page to 9 % of its size; level 9 would reach 7 % in eight times the time."""


class MetricsRoute:
    """Replies to scrapes from the current snapshot, without a call to the driver or to a process."""

    def __init__(self, exposition: Exposition, snapshot: Callable[[], Snapshot]) -> None:
        self._exposition = exposition
        self._snapshot = snapshot

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply to a scrape."""
        accept, encodings = _accept_headers(scope)
        openmetrics = prefers_openmetrics(accept)
        page = self._exposition.render(self._snapshot(), openmetrics=openmetrics)
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
                page = await asyncio.to_thread(_gzip, page)  # zlib releases the GIL
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
