"""Which sender may report for which process, with scripted hosts; real users and namespaces are integration tests."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
from dataclasses import dataclass, field

import pytest

from gpumem_client.wire.peer import SocketOwner
from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.edge.peer import Peer, PeerPlace
from gpumem_exporter.errors import ForeignProcessError
from gpumem_exporter.reports.report_sender import ReportedProcess, ReportSenders
from tests.support.builders.builders import NobodyHost, identity

CONTAINER, OTHER = (Place(known=True, container=letter * 64) for letter in "co")


def user(uid: int = 1001, place: Place = HERE, pid: int = 0) -> Peer:
    """The peer of a unix socket."""
    return Peer(uid=uid, pid=pid, start_time_ticks=1000, place=place)


@dataclass
class Host(NobodyHost):
    """A host whose processes have the pids of their reports."""

    uid: int | None = 1001
    where: Place = HERE
    found: bool = True
    lookups: list[int] = field(default_factory=list)

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        self.lookups.append(identity.pid)
        return identity.pid if self.found else None

    def place(self, host_pid: int) -> Place:
        return self.where

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:
        return self.uid


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.host = Host()
        self.senders = ReportSenders(self.host, clock=lambda: self.now, max_known=2)

    def identify(self, peer: Peer, pid: int = 7) -> tuple[int | None, int | None]:
        found = asyncio.run(self.senders.identify(identity(pid), peer))
        assert isinstance(found, ReportedProcess)
        return found.host_pid, found.owner_uid


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("uid", "place", "names"),
    [
        (os.geteuid(), HERE, {(uid, place) for uid in (0, 1001, 1002) for place in (HERE, CONTAINER)}),
        (1001, HERE, {(1001, HERE), (1001, CONTAINER)}),
        (1001, CONTAINER, {(1001, CONTAINER)}),
        (0, CONTAINER, {(uid, CONTAINER) for uid in (0, 1001, 1002)}),
        (0, OTHER, set()),
        (1001, UNKNOWN, set()),
        (0, UNKNOWN, set()),
    ],
)
def test_a_sender_names_the_processes_that_its_user_may_end_from_its_place(
    bench: Bench, uid: int, place: Place, names: set[tuple[int, Place]]
) -> None:
    admitted = set()
    for bench.host.uid in (0, 1001, 1002):
        for bench.host.where in (HERE, CONTAINER):
            with contextlib.suppress(ForeignProcessError):
                bench.identify(user(uid, place))
                admitted.add((bench.host.uid, bench.host.where))
    assert admitted == names


def test_every_process_may_name_itself_and_no_later_one_with_its_pid(bench: Bench) -> None:
    bench.host.uid = 1002  # it has changed its user since it connected
    assert bench.identify(user(1001, UNKNOWN, pid=7)) == (7, 1002)
    with pytest.raises(ForeignProcessError):
        bench.identify(dataclasses.replace(user(1001, UNKNOWN, pid=7), start_time_ticks=999))


def test_root_over_a_connection_that_may_be_passed_on_names_its_own_processes_only(bench: Bench) -> None:
    peer = Peer("127.0.0.1", uid=0, tcp=SocketOwner(0, 1))
    peer.where = PeerPlace(HERE, certain=False)
    with pytest.raises(ForeignProcessError):
        bench.identify(peer)
    bench.host.uid = 0
    assert bench.identify(peer, pid=8) == (8, 0)


def test_a_process_that_cannot_be_seen_is_reported_over_tcp_from_an_unknown_place(bench: Bench) -> None:
    """Behind a proxy or in a sandbox, neither is seen. A process that is seen needs a known place."""
    peer = Peer("127.0.0.1", uid=1001, tcp=SocketOwner(1001, 1))
    peer.where = PeerPlace(UNKNOWN, certain=False)
    with pytest.raises(ForeignProcessError, match="report over the unix socket"):
        bench.identify(peer)
    bench.host.uid = None
    assert bench.identify(peer, pid=8) == (None, 1001)


def test_a_reporter_with_only_a_token_has_no_owner(bench: Bench) -> None:
    remote = Peer("192.0.2.7")
    assert bench.identify(remote) == (7, None)
    bench.host.found = False
    with pytest.raises(ForeignProcessError, match="another process"):
        bench.identify(remote, pid=8)
    bench.host.uid = None
    assert bench.identify(remote, pid=9) == (None, None)


def test_a_process_that_was_not_found_is_searched_again_after_a_while(bench: Bench) -> None:
    bench.host.uid, bench.host.found = None, False
    peer = user(pid=7)
    assert bench.identify(peer) == (None, 1001)
    bench.host.uid, bench.host.found = 1001, True
    bench.now = 9.0
    assert bench.identify(peer) == (None, 1001)
    bench.now = 10.0
    assert bench.identify(peer) == (7, 1001)


def test_a_decision_is_made_once_for_each_connection(bench: Bench) -> None:
    for peer in (user(), user()):
        for _ in range(3):
            bench.identify(peer)
    assert bench.host.lookups == [7, 7]
    for pid in (1, 2, 3, 3, 1):
        bench.identify(peer, pid)
    assert bench.host.lookups == [7, 7, 1, 2, 3, 1], "two are remembered"
