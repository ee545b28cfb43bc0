"""`GET /metrics`: the page in the format and encoding that the scraper accepts."""

from __future__ import annotations

import asyncio
import gzip
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from urllib.parse import parse_qsl

from prometheus_client.exposition import choose_encoder
from starlette.datastructures import Headers
from starlette.types import Receive, Scope, Send

from gpumem_client.wire.protocol import MAX_LABEL_LENGTH
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.core.spelling import did_you_mean
from gpumem_exporter.edge.connections import Exchange
from gpumem_exporter.edge.fair_queue import Turns
from gpumem_exporter.edge.problems import ProblemCode, ProblemError
from gpumem_exporter.edge.replies import accepts_gzip
from gpumem_exporter.metrics.exposition import CONTENT_TYPE_OPENMETRICS, CONTENT_TYPE_TEXT, Exposition

# The time for which a page keeps other requests waiting. A page of 64 processes on 8 devices takes ten such steps. In a
# thread it would take longer: the thread and the event loop would wait for each other at Python's lock.
_STEP_SECONDS = 0.0005
# The number of pages that are sent at the same time, in all and to one user or machine. Others wait.
_SCRAPES, _SCRAPES_OF_OWNER = 256, 8
# The largest page that the event loop compresses itself.
_INLINE_GZIP_BYTES = 64 << 10
# The lines of one family of a process, 0.1 to 1 KiB each.
_PIECES_OF_PART = 64
# The media type in OpenMetrics, or not.
_CONTENT_TYPES = {True: CONTENT_TYPE_OPENMETRICS.encode(), False: CONTENT_TYPE_TEXT.encode()}
# Compresses a page to 9 % of its size; level 9 would reach 7 % in eight times the time.
_GZIP_LEVEL = 1


class MetricsRoute:
    """Replies to scrapes from the current snapshot, without a call to the driver or to a process."""

    def __init__(self, exposition: Exposition, snapshot: Callable[[], Snapshot]) -> None:
        self._exposition = exposition
        self._pages = SharedPages(lambda **chosen: exposition.render(snapshot(), **chosen))
        self._turns = Turns(_SCRAPES, running_of_owner=_SCRAPES_OF_OWNER)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply to a scrape, in a turn of its sender that lasts until the page is sent."""
        if scope["method"] != "GET":
            detail = f"metrics are read with GET, not with {scope['method']}"
            problem = ProblemError(ProblemCode.WRONG_METHOD, detail, {"Allow": "GET, HEAD"})
            await problem.response()(scope, receive, send)
            return
        accepted = Headers(scope=scope)
        openmetrics = chooses_openmetrics(",".join(accepted.getlist("accept")))
        compress = accepts_gzip(",".join(accepted.getlist("accept-encoding")))
        try:
            query = scope["query_string"]
            collectors = self._chosen(query) if query else frozenset[str]()
            async with self._turns.of(Exchange.of(scope).owner):
                page = await self._pages.next(openmetrics=openmetrics, collectors=collectors)
                parts = [await page.compressed()] if compress else page.parts
                headers = [
                    (b"content-type", _CONTENT_TYPES[openmetrics]),
                    (b"content-length", b"%d" % sum(map(len, parts))),
                    (b"vary", b"Accept, Accept-Encoding"),
                    (b"cache-control", b"no-store"),
                    *([(b"content-encoding", b"gzip")] if compress else []),
                ]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                for part in parts:
                    await send({"type": "http.response.body", "body": part, "more_body": True})
                await send({"type": "http.response.body"})
        except ProblemError as refusal:
            await refusal.response()(scope, receive, send)

    def _chosen(self, query: bytes) -> frozenset[str]:
        """Return the collectors that a query names with `collect[]`; empty for all. Raises ProblemError (400)."""
        chosen = frozenset(
            value for key, value in parse_qsl(query.decode("latin-1"), keep_blank_values=True) if key == "collect[]"
        )
        for name in sorted(chosen.difference(self._exposition.collectors)):
            known = self._exposition.collectors
            reason = f"is off (--no-collector.{name})" if name in self._exposition.off else "does not exist"
            advice = did_you_mean(name, known, f"collect[] accepts {', '.join(known)}")
            detail = f"the collector {name[:MAX_LABEL_LENGTH]!r} {reason}; {advice}"
            raise ProblemError(ProblemCode.UNKNOWN_COLLECTOR, detail)
        return chosen


def chooses_openmetrics(accept: str) -> bool:
    """Return whether prometheus_client would reply to the client in OpenMetrics."""
    # Its content type may have the version of the request, but the page is in version 1.0.0.
    try:
        return choose_encoder(accept)[1].startswith("application/openmetrics-text")
    except TypeError:  # it compares the parts of the version with numbers
        return False


@dataclass(slots=True)
class Page:
    """A rendered page, shared by its readers."""

    parts: list[bytes]
    """The text, in parts that are shorter than 128 KiB: malloc() takes longer blocks from the system, page by page."""
    _compressed: asyncio.Future[bytes] | None = None

    async def compressed(self) -> bytes:
        """Return the page as gzip, which is compressed once."""
        if self._compressed is None:
            if sum(map(len, self.parts)) <= _INLINE_GZIP_BYTES:
                self._compressed = asyncio.get_running_loop().create_future()
                self._compressed.set_result(self._compress())
            else:
                self._compressed = asyncio.ensure_future(asyncio.to_thread(self._compress))
        return await asyncio.shield(self._compressed)

    def _compress(self) -> bytes:
        return gzip.compress(b"".join(self.parts), _GZIP_LEVEL)


class SharedPages:
    """Renders pages, each for all readers that wait for it. Used on the event loop only.

    A reader gets a page that was rendered after its request. Pages are rendered one at a time and in short steps,
    between which the event loop answers other requests.
    """

    def __init__(
        self, render: Callable[..., Iterable[list[bytes]]], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._render = render
        self._clock = clock
        self._due_seconds = 0.0
        # The next page of each format (OpenMetrics or not) and choice of collectors.
        self._waiting: dict[tuple[bool, frozenset[str]], asyncio.Future[Page]] = {}
        self._rendering: asyncio.Task[None] | None = None

    async def next(self, *, openmetrics: bool, collectors: frozenset[str] = frozenset()) -> Page:
        """Return the next page in OpenMetrics or in Prometheus' text format, of some collectors or of all."""
        key = openmetrics, collectors
        waiting = self._waiting.get(key)
        if waiting is None:
            waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        if self._rendering is None:
            self._rendering = asyncio.ensure_future(self._render_waiting())
        # A reader that disconnects must not cancel the page of the others.
        return await asyncio.shield(waiting)

    async def _render_waiting(self) -> None:
        """Render pages until no reader waits."""
        try:
            while self._waiting:
                await asyncio.sleep(max(0.0, self._due_seconds - self._clock()))
                key = next(iter(self._waiting))
                # Before it is rendered: the page may already lack what a reader that comes meanwhile expects.
                waiting = self._waiting.pop(key)
                try:
                    waiting.set_result(await self._page(*key))
                except Exception as error:  # noqa: BLE001 - its readers get it
                    waiting.set_exception(error)
        finally:
            self._rendering = None

    async def _page(self, openmetrics: bool, collectors: frozenset[str]) -> Page:
        pieces: list[bytes] = []
        spent_seconds, started_seconds = 0.0, self._clock()
        for some in self._render(openmetrics=openmetrics, collectors=collectors):
            pieces += some
            if (step_seconds := self._clock() - started_seconds) > _STEP_SECONDS:
                spent_seconds += step_seconds
                await asyncio.sleep(0)
                started_seconds = self._clock()
        # After a page, as much time as it took is left for other work; readers that come meanwhile share the next one.
        now = self._clock()
        self._due_seconds = now + spent_seconds + now - started_seconds
        parts = [b"".join(pieces[start : start + _PIECES_OF_PART]) for start in range(0, len(pieces), _PIECES_OF_PART)]
        return Page(parts)
