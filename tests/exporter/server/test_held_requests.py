from __future__ import annotations

import asyncio
from collections.abc import Hashable
from typing import Any

import pytest

from gpumem_exporter.server.http.turns import Held, HeldRequests


class Clients:
    """Requests that are held; a client is silent until it disconnects."""

    def __init__(self) -> None:
        self.requests = HeldRequests()
        self.gone: dict[Hashable, asyncio.Event] = {}

    async def hold(self, client: str, key: Hashable, seconds: float = 1000.0) -> Held:
        self.gone[client] = asyncio.Event()

        async def receive() -> Any:
            await self.gone[client].wait()
            return {"type": "http.disconnect"}

        return await self.requests.hold(key, seconds, receive)

    async def held(self, **keys: Hashable) -> dict[str, asyncio.Task[Held]]:
        """Hold a request of each client, for this key."""
        tasks = {client: asyncio.ensure_future(self.hold(client, key)) for client, key in keys.items()}
        while len(self.requests) < len(tasks):
            await asyncio.sleep(0)
        return tasks


async def test_waking_ends_every_request_that_waits_for_the_same() -> None:
    clients = Clients()
    tasks = await clients.held(one="action", another="action", other="process")
    clients.requests.wake("action")
    clients.requests.wake("unknown")
    assert await asyncio.gather(*(tasks[client] for client in ("one", "another"))) == [Held.WOKEN] * 2
    assert len(clients.requests) == 1
    clients.requests.stop()
    assert await tasks["other"] is Held.STOPPING


async def test_a_disconnect_ends_only_the_request_of_that_client() -> None:
    clients = Clients()
    tasks = await clients.held(going="action", staying="action")
    clients.gone["going"].set()
    assert await tasks["going"] is Held.GONE
    assert len(clients.requests) == 1
    clients.requests.wake("action")
    assert await tasks["staying"] is Held.WOKEN


async def test_stopping_ends_every_request_and_each_later_one() -> None:
    clients = Clients()
    tasks = await clients.held(one=1, two=2)
    clients.requests.stop()
    assert await asyncio.gather(*tasks.values()) == [Held.STOPPING] * 2
    assert await clients.hold("late", 1) is Held.STOPPING


@pytest.mark.parametrize("seconds", [0.0, 0.001])
async def test_a_request_is_held_for_its_time_at_most(seconds: float) -> None:
    clients = Clients()
    assert await clients.hold("one", "action", seconds) is Held.LATE
    assert len(clients.requests) == 0
