from __future__ import annotations

import asyncio
from typing import Any

from gpumem_exporter.server.http.turns import Held, HeldRequests


async def test_a_request_is_held_until_it_is_woken_or_late_or_its_client_or_the_exporter_goes() -> None:
    requests, gone, forever = HeldRequests(), asyncio.Event(), asyncio.Event()

    def hold(key: str, seconds: float = 1000.0, until: asyncio.Event = forever) -> asyncio.Task[Held]:
        async def receive() -> Any:
            await until.wait()
            return {"type": "http.disconnect"}

        return asyncio.ensure_future(requests.hold(key, seconds, receive))

    woken = [hold("action"), hold("action")]
    leaving, other = hold("process", until=gone), hold("process")
    assert [await hold("action", seconds) for seconds in (0.0, 0.001)] == [Held.LATE] * 2
    assert len(requests) == 4
    requests.wake("action")
    requests.wake("unknown")
    assert await asyncio.gather(*woken) == [Held.WOKEN] * 2
    gone.set()
    assert await leaving is Held.GONE
    assert len(requests) == 1
    requests.stop()
    assert await other is Held.STOPPING
    assert await hold("late") is Held.STOPPING
    assert len(requests) == 0
