from __future__ import annotations

import asyncio
import importlib.metadata
import inspect
import socket
from typing import Any

import pytest
import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from gpumem_exporter.server.http import protocol as module
from gpumem_exporter.server.http.connections import Connection, Limits
from gpumem_exporter.server.http.peer import Peer
from gpumem_exporter.server.http.protocol import SUPPORTED_UVICORN, Clients, LimitedProtocol, ReplyTransport
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient


def test_the_supported_versions_are_those_of_the_package() -> None:
    assert f'"uvicorn{SUPPORTED_UVICORN}",' in (REPOSITORY / "pyproject.toml").read_text()
    least, below = (bound.lstrip(">=<") for bound in SUPPORTED_UVICORN.split(","))
    installed = importlib.metadata.version("uvicorn")
    assert numbers(least) <= numbers(installed) < numbers(below)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


@pytest.mark.parametrize(
    ("of", "names"),
    [
        (uvicorn.Server, ("startup", "shutdown", "run")),
        (
            HttpToolsProtocol,
            (
                *("connection_made", "connection_lost", "data_received", "pause_writing", "resume_writing"),
                *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body"),
                *("on_message_complete", "on_response_complete", "send_400_response", "shutdown"),
            ),
        ),
    ],
)
def test_uvicorn_has_the_methods_that_are_extended(of: type, names: tuple[str, ...]) -> None:
    assert [name for name in names if not inspect.isfunction(getattr(of, name, None))] == []


async def test_uvicorn_has_the_attributes_that_are_used() -> None:
    async def application(scope: Any, receive: Any, send: Any) -> None: ...

    config = uvicorn.Config(application, http=LimitedProtocol, ws="none", log_config=None)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    config.load()
    assert config.http_protocol_class is LimitedProtocol
    state = server.server_state
    assert isinstance(state, ServerState)
    assert state.connections == set()
    protocol = LimitedProtocol(
        config=config,
        server_state=state,
        app_state={},
        connection=Connection(Peer(), ""),
        clients=Clients(Limits(max_connections=1)),
    )
    used = ("app", "connections", "cycle", "loop", "pipeline", "scope", "transport")
    assert [name for name in used if not hasattr(protocol, name)] == []
    source = inspect.getsource(RequestResponseCycle.__init__)
    for name in ("body", "disconnected", "message_event", "response_complete", "response_started"):
        assert f"self.{name} = " in source
    assert "self.lifespan = " in inspect.getsource(uvicorn.Server)
    assert "self.servers" in inspect.getsource(uvicorn.Server)


@pytest.mark.parametrize("unfinished", [False, True])
async def test_a_client_that_reads_nothing_does_not_keep_its_connection(
    unfinished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READ_AWAY_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(module, name, 0.01)

    loop = asyncio.get_running_loop()
    lost = loop.create_future()

    class Protocol(asyncio.Protocol):
        def connection_lost(self, exc: Exception | None) -> None:
            lost.set_result(exc)

    silent, sock = socket.socketpair()
    sock.setblocking(False)
    with silent:
        transport, _ = await loop.connect_accepted_socket(Protocol, sock)
        reply = ReplyTransport(transport, loop, lambda: unfinished)
        reply.write(b"x" * (1 << 20))
        reply.close()
        await asyncio.wait_for(lost, patient(10))
