from __future__ import annotations

import asyncio
import itertools
import zlib
from collections.abc import Iterator

from gpumem_exporter.server.api.metrics import Page, SharedPages
from gpumem_exporter.server.http.connections import PIECE_BYTES


async def test_readers_that_wait_share_a_page() -> None:
    rendered: list[bool] = []
    milliseconds = itertools.count()

    def render(*, openmetrics: bool) -> Iterator[bytes]:
        rendered.append(openmetrics)
        yield from [b""] * 10
        yield b"page %d" % len(rendered)

    pages = SharedPages(render, clock=lambda: next(milliseconds) / 1000)  # the event loop goes on after each line
    first = asyncio.ensure_future(pages.next(openmetrics=False))
    while not rendered:
        await asyncio.sleep(0)
    later = [asyncio.ensure_future(pages.next(openmetrics=openmetrics)) for openmetrics in (False, True) * 10]
    assert (await first).pieces == (b"page 1",)
    found = await asyncio.gather(*later)
    assert len({id(page) for page in found}) == 2
    assert rendered == [False, False, True]


async def test_a_page_is_rendered_after_its_request() -> None:
    value = [0]
    pages: list[SharedPages] = []

    def render(*, openmetrics: bool) -> list[bytes]:
        return [b"%d" % value[0]]

    pages.append(SharedPages(render))
    for number in range(50):
        value[0] = number
        assert (await pages[0].next(openmetrics=False)).pieces == (b"%d" % number,)


async def test_an_error_reaches_its_readers_and_the_next_page_is_rendered() -> None:
    failing = [True]

    def render(*, openmetrics: bool) -> list[bytes]:
        if failing[0]:
            raise ValueError
        return [b"page"]

    pages = SharedPages(render)
    (found,) = await asyncio.gather(pages.next(openmetrics=False), return_exceptions=True)
    assert isinstance(found, ValueError)
    failing[0] = False
    assert (await pages.next(openmetrics=False)).pieces == (b"page",)


async def test_a_page_is_compressed_once() -> None:
    for pieces in ((b"short",), (b"long" * 100_000, b"end")):
        page = Page(pieces)
        first, second = await asyncio.gather(page.compressed(), page.compressed())
        assert first is second
        assert zlib.decompress(b"".join(first), 16 + zlib.MAX_WBITS) == b"".join(pieces)


async def test_a_page_has_pieces_that_can_be_sent() -> None:
    rendered = [b"", b"short", b"long" * PIECE_BYTES, b"end"]
    page = await SharedPages(lambda openmetrics: rendered).next(openmetrics=False)
    assert b"".join(page.pieces) == b"".join(rendered)
    assert all(0 < len(piece) <= PIECE_BYTES for piece in page.pieces)
