"""The kernel's answers about the owners of real sockets."""

from __future__ import annotations

import os
import socket

import pytest

from gpumem_client.wire import peer
from tests.support.processes.other_user import acting_as, needs_root


@pytest.fixture(params=["sock_diag", "proc"])
def _source(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each source of the kernel alone."""
    if request.param == "proc":
        monkeypatch.setattr(socket, "AF_NETLINK", 255)


def listener(host: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, dualstack_ipv6=host == "::")


def owner(found: peer.SocketOwner | None) -> tuple[int, int] | None:
    return found and found[:2]


@needs_root
@pytest.mark.usefixtures("_source")
@pytest.mark.parametrize(("bound", "to"), [("127.0.0.1", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "::1")])
def test_each_end_of_a_loopback_connection_names_the_user_of_the_other(bound: str, to: str) -> None:
    with listener(bound) as server:
        with acting_as(1001):
            client = socket.create_connection((to, server.getsockname()[1]))
        with client:
            waiting = peer.tcp_peer_owner(client)
            assert waiting is None, "a connection that is not accepted has no owner"
            assert owner(peer.tcp_listener_owner(client.getpeername()[:2])) == (0, os.fstat(server.fileno()).st_ino)
            accepted, _ = server.accept()
            with accepted:
                assert owner(peer.tcp_peer_owner(accepted)) == (1001, os.fstat(client.fileno()).st_ino)
                assert owner(peer.tcp_peer_owner(client)) == (0, os.fstat(accepted.fileno()).st_ino)


@needs_root
@pytest.mark.usefixtures("_source")
def test_a_closed_socket_is_not_taken_for_roots() -> None:
    with listener("127.0.0.1") as server:
        with acting_as(1001):
            client = socket.create_connection(server.getsockname())
        accepted, _ = server.accept()
        with accepted:
            client.sendall(b"POST /api/v1/actions")
            client.close()
            assert peer.tcp_peer_owner(accepted) is None


def test_the_peer_of_a_unix_socket_is_the_process_that_connected() -> None:
    first, second = socket.socketpair(socket.AF_UNIX)
    with first, second:
        assert peer.unix_peer(first) == (os.getpid(), os.geteuid(), os.getegid())
