"""The end of a connection whose client does not read."""

from __future__ import annotations

import asyncio
import socket

import pytest

from gpumem_exporter.server.http import protocol
from gpumem_exporter.server.http.protocol import ReplyTransport
from tests.support.waiting import patient


@pytest.mark.parametrize("unfinished", [False, True])
def test_a_client_that_reads_nothing_does_not_keep_its_connection(
    unfinished: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("READ_AWAY_SECONDS", "UNREAD_SECONDS"):
        monkeypatch.setattr(protocol, name, 0.01)

    async def scenario() -> None:
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

    asyncio.run(scenario())
