from __future__ import annotations

import asyncio
import importlib.metadata
import math
import socket
from functools import partial

import pytest

from gpumem_exporter.edge import protocol as module
from gpumem_exporter.edge.connections import Connection, Connections, Owner, owner_of
from gpumem_exporter.edge.peer import Peer
from gpumem_exporter.edge.protocol import SUPPORTED_UVICORN, ReplyTransport, RequestBodies, UnreadReplies
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connections(clock: Clock) -> Connections:
    return Connections(8, clock)


CLOSED: list[Connection] = []


def connection(owner: Owner) -> Connection:
    made = Connection(Peer(), owner)
    made.close = lambda: CLOSED.append(made)
    return made


def connect(connections: Connections, owner: Owner) -> Connection:
    made = connection(owner)
    assert connections.admit(made)
    return made


@pytest.fixture(autouse=True)
def closed() -> list[Connection]:
    CLOSED.clear()
    return CLOSED


def test_the_longest_idle_connection_of_the_same_owner_makes_room_after_a_second(
    connections: Connections, clock: Clock, closed: list[Connection]
) -> None:
    first, second, third, fourth = (connect(connections, "1") for _ in range(4))
    assert connect(connections, "1").refused, "an owner has at most half"
    first.waiting_since_seconds = math.inf
    second.waiting_since_seconds = clock() + 0.1
    clock.seconds += 1.5
    assert not connect(connections, "1").refused
    assert closed == [third]
    first.waiting_since_seconds = clock()
    assert not connect(connections, "1").refused
    assert closed == [third, fourth]


def test_the_owner_with_the_most_makes_room_for_another_at_once(
    connections: Connections, closed: list[Connection]
) -> None:
    several = [connect(connections, "1") for _ in range(4)]
    few = [connect(connections, "10.0.0.1") for _ in range(3)]
    one = connect(connections, "2")
    for busy in (*several[:2], *few, one):
        busy.waiting_since_seconds = math.inf
    assert not connect(connections, "3").refused
    assert closed == [several[2]]


def test_a_busy_connection_makes_room_for_another_owner_if_all_are_busy(
    connections: Connections, closed: list[Connection]
) -> None:
    busy = [connect(connections, owner) for owner in "11112222"]
    for each in busy:
        each.waiting_since_seconds = math.inf
    assert not connect(connections, "3").refused
    assert closed == [busy[0]]
    assert connect(connections, "2").refused


def test_refused_connections_are_bounded_too(connections: Connections) -> None:
    assert not connections.close_one()
    mine = [Connection(Peer(), "1") for _ in range(200)]
    for each in mine:
        connections.admit(each)
    assert not connections.admit(Connection(Peer(), "1"))
    assert connections.admit(Connection(Peer(), "2"))
    for each in mine:
        connections.remove(each)
        connections.remove(each)
    assert len(connections) == 1
    assert connections.close_one()
    assert connections.admit(Connection(Peer(), "1"))


def test_a_user_a_machine_or_a_network_of_ipv6_addresses_is_an_owner() -> None:
    assert owner_of(Peer(uid=7)) == owner_of(Peer("127.0.0.1", uid=7)) != owner_of(Peer(uid=8))
    assert owner_of(Peer("10.1.2.3")) != owner_of(Peer("10.1.2.4"))
    assert owner_of(Peer("2001:db8::1")) == owner_of(Peer("2001:db8:0:0:ffff::2"))
    assert owner_of(Peer("2001:db8::1")) != owner_of(Peer("2001:db8:0:1::1"))
    assert owner_of(Peer("fe80::1%eth0")) == owner_of(Peer("fe80::2%eth0"))


def test_the_longest_body_of_the_owner_with_the_most_is_rejected() -> None:
    bodies = RequestBodies(100)
    rejected: list[Connection] = []
    several = [connection("a") for _ in range(4)]
    one = connection("b")

    def reject(each: Connection) -> None:
        rejected.append(each)
        bodies.free(each)

    for each in (*several, one):
        each.reject_bodies = partial(reject, each)
    bodies.add(one, 40)
    for each, size in zip(several, (9, 25, 25, 1), strict=True):
        bodies.add(each, size)
    assert not rejected
    bodies.add(several[0], 6)
    assert rejected == [several[1]], "the older one of two equal bodies"
    bodies.add(one, 19)
    assert rejected == [several[1]]


def test_a_page_counts_once_for_all_its_readers(closed: list[Connection]) -> None:
    unread = UnreadReplies(100)
    page = object()
    readers = [connection(str(number)) for number in range(20)]
    for each in readers:
        unread.send(each, page, 90)
    assert unread.total_bytes == 90
    for each in readers:
        unread.sent(each)
    assert unread.total_bytes == 0
    assert not closed


def test_the_owner_with_the_most_unread_bytes_loses_first(closed: list[Connection]) -> None:
    unread = UnreadReplies(100)
    first, second, other = (connection(owner) for owner in ("a", "a", "b"))
    unread.buffer(first, 30)
    unread.buffer(second, 25)
    unread.send(other, object(), 40)
    assert not closed
    unread.buffer(second, 35)
    assert closed == [second]
    assert unread.total_bytes == 70
    unread.buffer(second, 0)
    unread.sent(second)
    unread.forget(other)
    unread.forget(first)
    assert unread.total_bytes == 0


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
