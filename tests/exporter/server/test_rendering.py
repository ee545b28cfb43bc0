"""The thread that builds large replies."""

from __future__ import annotations

import asyncio
import json
import threading

import pytest

from gpumem_exporter.server.http.replies import Renderer, encoded


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
    renderer.close()


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_a_document_is_encoded_as_in_one_piece(separators: tuple[str, str]) -> None:
    document = {"a": [1, {"b": None}], "c": "é\n", "d": (), "e": {"x": [1.5, True]}, "f": []}
    whole = json.dumps(document, ensure_ascii=False, separators=separators).encode()
    assert encoded(document, separators=separators) == whole
    with pytest.raises(ValueError, match="JSON compliant"):
        encoded({"a": [float("nan")]})
