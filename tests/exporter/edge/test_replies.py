"""How replies are chosen, shared, rendered and cut."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import zlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_exporter.core.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.edge.replies import Renderer, accepts_gzip, encoded
from gpumem_exporter.metrics.metrics_route import Page, SharedPages, chooses_openmetrics
from gpumem_exporter.page.state_routes import Rendering, StateRoutes

PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,application/openmetrics-text;version=0.0.1;"
    "q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)


@pytest.mark.parametrize(
    ("accept", "openmetrics"),
    [
        ("", False),
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("text/plain;version=0.0.4;q=1,*/*;q=0.1", False),
        ("application/openmetrics-text; version=1.0.0; charset=utf-8", True),
        ("application/openmetrics-text;version=0.0.1,text/plain;q=0.5", False),
        ("application/openmetrics-text;version=none", False),
        (",;,=;q,", False),
    ],
)
def test_the_format_is_the_one_that_prometheus_client_chooses(accept: str, openmetrics: bool) -> None:
    assert chooses_openmetrics(accept) is openmetrics


@pytest.mark.parametrize(
    ("encodings", "gzip"),
    [
        ("", False),
        ("deflate, GZIP;q=0.5", True),
        ("gzip;q=0.0, *", False),
        ("br;q=1, gzip ; q=1.0", True),
        ("br, gzip; q=0", False),
    ],
)
def test_gzip_is_used_only_if_the_client_accepts_it(encodings: str, gzip: bool) -> None:
    assert accepts_gzip(encodings) is gzip


async def test_waiting_calls_share_a_result_and_later_ones_get_a_new_one() -> None:
    renderer, release = Renderer(), threading.Event()
    built: list[int] = []

    def build() -> bytes:
        built.append(len(built))
        if built == [0]:
            release.wait()
        return str(built[-1]).encode()

    first = asyncio.ensure_future(renderer.render_shared("a", build))
    while not built:
        await asyncio.sleep(0.001)
    second, third = (asyncio.ensure_future(renderer.render_shared("a", build)) for _ in range(2))
    other = asyncio.ensure_future(renderer.render_shared("b", build))
    await asyncio.sleep(0)
    second.cancel()
    release.set()
    assert [await first, await third, await other] == [b"0", b"1", b"2"]
    assert await renderer.render_shared("a", build) == b"3"
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            await renderer.render_shared("a", lambda: b"%d" % (1 // 0))


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_a_document_is_encoded_as_in_one_piece(separators: tuple[str, str]) -> None:
    document = {"a": [1, {"b": None}], "c": "é\n", "d": (), "e": {"x": [1.5, True]}, "f": []}
    whole = json.dumps(document, ensure_ascii=False, separators=separators).encode()
    assert encoded(document, separators=separators) == whole
    with pytest.raises(ValueError, match="JSON compliant"):
        encoded({"a": [float("nan")]})


async def test_readers_that_wait_share_a_page() -> None:
    rendered: list[tuple[bool, frozenset[str]]] = []
    milliseconds = itertools.count()

    def render(*, openmetrics: bool, collectors: frozenset[str]) -> Iterator[list[bytes]]:
        rendered.append((openmetrics, collectors))
        for _ in range(10):
            yield []
        yield [b"page ", b"%d" % len(rendered)]

    pages = SharedPages(render, clock=lambda: next(milliseconds) / 1000)  # the event loop goes on after each line
    first = asyncio.ensure_future(pages.next(openmetrics=False))
    while not rendered:
        await asyncio.sleep(0)
    later = [asyncio.ensure_future(pages.next(openmetrics=openmetrics)) for openmetrics in (False, True) * 10]
    assert b"".join((await first).parts) == b"page 1"
    found = await asyncio.gather(*later)
    assert len({id(page) for page in found}) == 2
    every, some = frozenset[str](), frozenset({"devices"})
    assert rendered == [(False, every), (False, every), (True, every)]
    found = await asyncio.gather(*(pages.next(openmetrics=True, collectors=one) for one in (every, some, some)))
    assert [b"".join(page.parts) for page in found] == [b"page 4", b"page 5", b"page 5"]
    assert rendered[-1] == (True, some)


async def test_an_error_reaches_its_readers_and_the_next_page_is_rendered() -> None:
    failing = [True]

    rendered: list[list[bytes]] = [[], [b"short"] * 100, [b"end"]]

    def render(*, openmetrics: bool, collectors: frozenset[str]) -> list[list[bytes]]:
        if failing[0]:
            raise ValueError
        return rendered

    pages = SharedPages(render)
    (found,) = await asyncio.gather(pages.next(openmetrics=False), return_exceptions=True)
    assert isinstance(found, ValueError)
    failing[0] = False
    assert b"".join((await pages.next(openmetrics=False)).parts) == b"short" * 100 + b"end"


async def test_a_page_is_compressed_once() -> None:
    for body in (b"short", b"long" * 100_000):
        page = Page([body, b"end"])
        first, second = await asyncio.gather(page.compressed(), page.compressed())
        assert first is second
        assert zlib.decompress(first, 16 + zlib.MAX_WBITS) == body + b"end"


ROOT, STRANGER = Caller(CallerKind.LOOPBACK, Rights.ALL, uid=0), Caller(CallerKind.TCP, host="10.0.0.9")
ADA, EVE = (Caller(CallerKind.LOOPBACK, Rights.OWN, uid=uid) for uid in (1000, 1001))
HEALTH = {
    "version": "1",
    "source": "nvml",
    "mode": "node",
    "status": "ok",
    "checks": {},
    "nvml": {"up": True, "error": "", "released": False},
}


class View:
    """A view that counts how often it is rendered, and shows for whom."""

    def __init__(self) -> None:
        self.count = self.value = 0

    def document(self, *_: object, viewer: Caller | None, details: str) -> dict[str, Any]:
        self.count += 1
        return {"value": self.value, "viewer": viewer and viewer.uid, "details": details}


class Bench:
    def __init__(self) -> None:
        self.view, self.renderer, self.now = View(), Renderer(), 100.0
        view, health = self.view, HEALTH
        any_view: Any = view
        any_health: Any = SimpleNamespace(document=lambda _: health, source=health["source"])
        self.routes = StateRoutes(
            any_view,
            self.renderer,
            snapshot=lambda: Snapshot(self.now, None),
            health=any_health,
            facts={"host": "node-7", "allowed_actions": (), "client_directory": ""},
            page_digest=lambda: "",
            hide_identities_from=None,
            clock=lambda: self.now,
            wall_clock=lambda: self.now + 5.0,
        )

    def read(self, *viewers: Caller | None, details: str = "") -> list[Rendering]:
        async def run() -> list[Rendering]:
            return [await self.routes.rendering(viewer, details) for viewer in viewers]

        return asyncio.run(run())


def test_pages_share_a_recent_rendering() -> None:
    bench = Bench()
    first, second = bench.read(None, ROOT)
    bench.now += 0.4
    assert first is second is bench.read(None)[0]
    assert json.loads(first.time) == {"clock_seconds": 100.0, "unix_seconds": 105.0}
    bench.now += 0.2
    (later,) = bench.read(None)
    assert bench.view.count == 2
    assert (later.digest, later.time) == (first.digest, b'{"clock_seconds": 100.6, "unix_seconds": 105.6}')
    bench.now, bench.view.value = 102.0, 1
    assert bench.read(None)[0].digest != first.digest


def test_viewers_with_other_rights_never_share_a_rendering() -> None:
    bench = Bench()
    viewers = (ROOT, STRANGER, ADA, EVE, ADA, STRANGER, ROOT)

    async def read_at_once() -> list[Rendering]:
        return await asyncio.gather(*(bench.routes.rendering(viewer, "") for viewer in viewers))

    for seen in (bench.read(*viewers), asyncio.run(read_at_once())):
        assert [json.loads(each.document)["viewer"] for each in seen] == [0, None, 1000, 1001, 1000, None, 0]
