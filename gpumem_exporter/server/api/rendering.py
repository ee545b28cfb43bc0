"""Encodes large replies in a thread of their own, so that the event loop answers other clients meanwhile.

One reply is built at a time, which bounds their memory. Python lets the event loop run between two items of a list, but
not within one call of the JSON encoder: so a list is encoded item by item.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from fastapi import Response


class Renderer:
    """Runs functions that build replies, one at a time. Used on the event loop only."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "gpumem-replies")
        self._lock = threading.Lock()
        """Held while `_waiting` changes, by the event loop and by the thread, which may start at once."""
        self._waiting: dict[Hashable, asyncio.Future[bytes]] = {}

    async def render(self, build: Callable[[], bytes]) -> bytes:
        """Return what `build` returns in the thread."""
        return await asyncio.shield(asyncio.get_running_loop().run_in_executor(self._thread, build))

    async def render_shared(self, key: Hashable, build: Callable[[], bytes]) -> bytes:
        """Return what `build` returns in the thread, for all calls with an equal key that arrive before it has started.

        A call never gets a result that was started before it, so that a client reads what it has written.
        """

        def run() -> bytes:
            with self._lock:
                del self._waiting[key]
            return build()

        with self._lock:
            shared = self._waiting.get(key)
            if shared is None:
                shared = self._waiting[key] = asyncio.get_running_loop().run_in_executor(self._thread, run)
        return await asyncio.shield(shared)

    def close(self) -> None:
        """End the thread without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def encoded(document: Mapping[str, object], *, separators: tuple[str, str] = (", ", ": ")) -> bytes:
    """Return a document as JSON; the items of its lists are encoded one by one."""
    comma, colon = separators
    return f"{{{comma.join(_fields(document, comma, colon))}}}".encode("utf-8", "replace")


def _fields(document: Mapping[str, object], comma: str, colon: str) -> Iterator[str]:
    encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(comma, colon)).encode
    for name, value in document.items():
        text = f"[{comma.join(map(encode, value))}]" if isinstance(value, (list, tuple)) else encode(value)
        yield f"{encode(name)}{colon}{text}"


def json_bytes_response(body: bytes, status: int = 200) -> Response:
    """Return a JSON reply that caches do not store."""
    return Response(body, status, headers={"Cache-Control": "no-store"}, media_type="application/json")
