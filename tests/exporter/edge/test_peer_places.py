"""The search for the processes that hold connections over loopback."""

from __future__ import annotations

import asyncio
import os
import socket
import threading
from collections.abc import Collection
from pathlib import Path

import pytest

from gpumem_client.wire.peer import SocketOwner, tcp_peer_owner, unix_peer
from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.edge.peer import Peer, PeerPlaces
from gpumem_exporter.node.containers import Places
from gpumem_exporter.node.sockets import SocketHolders
from tests.support.waiting import patient, wait_for


class Holders(SocketHolders):
    """Counts the passes over /proc; a pass waits for a permission."""

    def __init__(self) -> None:
        self.passes: list[int] = []
        self.may_end = threading.Semaphore(0)

    def created_in(self, owner: SocketOwner) -> int | None:
        return owner.cgroup_id

    def places(self, wanted: Collection[SocketOwner]) -> dict[SocketOwner, set[Place]]:
        self.passes.append(len(wanted))
        assert self.may_end.acquire(timeout=patient(10))
        return {owner: {HERE} if owner.uid else set() for owner in wanted}


def connection(uid: int, inode: int) -> Peer:
    return Peer("127.0.0.1", uid=uid, tcp=SocketOwner(uid, inode, 1))


async def test_a_user_waits_for_two_passes_however_many_connections_another_one_opens() -> None:
    holders = Holders()
    places = PeerPlaces(holders)
    flood = [asyncio.ensure_future(places.of(connection(0, inode))) for inode in range(1, 41)]
    await asyncio.sleep(0)
    await asyncio.to_thread(wait_for, lambda: holders.passes, "the first pass")
    later = [asyncio.ensure_future(places.of(connection(0, inode))) for inode in range(41, 81)]
    user = asyncio.ensure_future(places.of(connection(1001, 99)))
    for _ in range(2):
        holders.may_end.release()
    assert (await user).place == HERE
    assert {place.place for place in await asyncio.gather(*flood, *later)} == {UNKNOWN}
    assert len(holders.passes) == 2


async def test_a_connection_is_searched_once() -> None:
    holders = Holders()
    places = PeerPlaces(holders)
    peer = connection(1001, 7)
    holders.may_end.release()
    assert (await places.of(peer)).place == (await places.of(peer)).place == HERE
    assert holders.passes == [1]


def test_the_holder_of_a_socket_is_found_and_no_process_after_it_was_closed() -> None:
    holders = SocketHolders(Places())
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        accepted, _ = server.accept()
        with accepted:
            owner = tcp_peer_owner(accepted)
            assert owner is not None
            for _ in range(2):  # the second time, its cgroup is known
                assert holders.places([owner]) == {owner: {HERE}}
            assert holders.place_of(os.getpid(), owner) == HERE
            assert holders.place_of(os.getpid(), owner._replace(uid=owner.uid + 1)) is None
            client.close()
            assert holders.places([owner]) == {owner: set()}


@pytest.mark.parametrize("kernel", ["6.5", "before"])
def test_a_process_that_exited_before_its_connection_was_accepted_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kernel: str
) -> None:
    """Another process may have its pid by then."""
    if kernel == "before":
        monkeypatch.setattr("gpumem_exporter.edge.peer.peer_pidfd", lambda _: None)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        kept = os.fork()
        if not kept:
            leaver = os.fork()
            if not leaver:
                waiting = socket.socket(socket.AF_UNIX)
                waiting.connect(str(tmp_path / "s"))
                os._exit(0 if waiting.detach() >= 0 else 1)
            os._exit(os.waitpid(leaver, 0)[1])
        assert os.waitpid(kept, 0)[1] == 0
        accepted, _ = server.accept()
        with accepted:
            assert unix_peer(accepted).pid > 0
            known = Peer.of_socket(accepted)
            assert (known.uid, known.pid, known.place) == (os.geteuid(), 0, UNKNOWN)
