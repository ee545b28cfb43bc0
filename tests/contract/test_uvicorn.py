"""The names of uvicorn that the edge uses and that uvicorn does not document."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable
from typing import Any

import pytest
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


@pytest.mark.parametrize("step", [uvicorn.Server.startup, uvicorn.Server.shutdown])
def test_the_server_has_a_step_at_its_start_and_before_its_end(step: Callable[..., object]) -> None:
    assert list(inspect.signature(step).parameters) == ["self", "sockets"]
    assert inspect.iscoroutinefunction(step)
