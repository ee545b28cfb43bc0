from __future__ import annotations

import asyncio
import importlib.metadata
import socket

import pytest

from gpumem_exporter.server.http import protocol as module
from gpumem_exporter.server.http.protocol import SUPPORTED_UVICORN, ReplyTransport
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient


def test_the_supported_versions_are_those_of_the_package() -> None:
    assert f'"uvicorn{SUPPORTED_UVICORN}",' in (REPOSITORY / "pyproject.toml").read_text()
    least, below = (bound.lstrip(">=<") for bound in SUPPORTED_UVICORN.split(","))
    installed = importlib.metadata.version("uvicorn")
    assert numbers(least) <= numbers(installed) < numbers(below)


def numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


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
