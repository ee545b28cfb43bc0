from __future__ import annotations

import asyncio
from typing import Any

from gpumem_exporter.server.http.held_requests import GONE, RELEASED, Holds


class Client:
    """A client that is silent until it disconnects."""

    def __init__(self) -> None:
        self.gone = asyncio.Event()

    async def receive(self) -> Any:
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def soon(condition: Any) -> None:
    while not condition():
        await asyncio.sleep(0)


def test_a_wait_returns_its_result() -> None:
    async def scenario() -> None:
        holds, client = Holds(), Client()
        result: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        async def awaited() -> str:
            return await result

        waiting = asyncio.ensure_future(holds.until(awaited(), client.receive))
        await soon(lambda: len(holds) == 1)
        result.set_result("command")
        assert await waiting == "command"
        assert len(holds) == 0

    asyncio.run(scenario())


def test_a_disconnect_ends_only_the_wait_of_that_client() -> None:
    async def scenario() -> None:
        holds, going, staying = Holds(), Client(), Client()
        cancelled = asyncio.Event()

        async def awaited() -> None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                cancelled.set()
                raise

        ends = asyncio.ensure_future(holds.until(awaited(), going.receive))
        stays = asyncio.ensure_future(holds.until(asyncio.Event().wait(), staying.receive))
        await soon(lambda: len(holds) == 2)
        going.gone.set()
        assert await ends is GONE
        await cancelled.wait()
        assert len(holds) == 1
        holds.release()
        assert await stays is RELEASED

    asyncio.run(scenario())


def test_release_ends_every_wait_and_each_later_one() -> None:
    async def scenario() -> None:
        holds = Holds()
        waits = [asyncio.ensure_future(holds.until(asyncio.Event().wait(), Client().receive)) for _ in range(3)]
        await soon(lambda: len(holds) == 3)
        holds.release()
        assert await asyncio.gather(*waits) == [RELEASED] * 3
        assert await holds.until(asyncio.Event().wait(), Client().receive) is RELEASED

    asyncio.run(scenario())
