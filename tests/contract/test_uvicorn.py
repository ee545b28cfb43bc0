"""The names of uvicorn that the edge uses and that uvicorn does not document."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState


class Transport(asyncio.Transport):
    def pause_reading(self) -> None:
        pass


async def test_the_protocol_calls_back_for_each_request_and_has_its_scope_its_headers_and_the_earlier_ones() -> None:
    seen: list[tuple[str, str]] = []
    waiting: list[tuple[int, list[tuple[bytes, bytes]]]] = []

    class Protocol(HttpToolsProtocol):
        def on_headers_complete(self) -> None:
            self.scope["state"]["exchange"] = "set"
            waiting.append((len(self.pipeline), self.headers))
            super().on_headers_complete()

    async def application(scope: dict[str, Any], *_: object) -> None:
        seen.append((scope["path"], scope["state"]["exchange"]))
        await asyncio.Event().wait()

    config = uvicorn.Config(application, interface="asgi3", http=Protocol, lifespan="off", log_config=None)
    config.load()
    assert config.http_protocol_class is Protocol
    state = ServerState()
    protocol = Protocol(config=config, server_state=state, app_state={})
    protocol.connection_made(Transport())
    protocol.data_received(b"GET /first HTTP/1.1\r\nHost: x\r\n\r\n" * 3)
    await asyncio.sleep(0)
    assert seen == [("/first", "set")]
    assert waiting == [(number, [(b"host", b"x")]) for number in (0, 0, 1)]
    (task,) = state.tasks
    task.cancel()
    await asyncio.wait([task])


async def test_the_server_calls_its_main_loop_once_started_and_exits_when_it_ends() -> None:
    steps: list[object] = []

    class Server(uvicorn.Server):
        async def main_loop(self) -> None:
            steps.append((self.started, await self.on_tick(0), [name for name, _ in self.server_state.default_headers]))
            self.should_exit = True
            steps.append(await self.on_tick(0))

    async def application(scope: object, *_: object) -> None:
        del scope

    config = uvicorn.Config(application, interface="asgi3", lifespan="off", log_config=None, server_header=False)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        await Server(config).serve([listening])
    assert steps == [(True, False, [b"date"]), True]
