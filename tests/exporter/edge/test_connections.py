from __future__ import annotations

from collections.abc import Callable

import pytest

from gpumem_exporter.edge.connections import Connection, Connections, Limits, Owner, owner_of
from gpumem_exporter.edge.peer import Peer

LIMITS = Limits(8, unread_bytes=100, request_seconds=10, unread_seconds=30, idle_seconds=75)


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def connections() -> Connections:
    return Connections(LIMITS)


ENDED: list[Connection] = []


def connection(owner: Owner, clock: Callable[[], float] = lambda: 100.0) -> Connection:
    made = Connection(Peer(owner), LIMITS, clock)
    made.abort = lambda: ENDED.append(made)
    return made


def connect(connections: Connections, owner: Owner, clock: Callable[[], float] = lambda: 100.0) -> Connection:
    made = connection(owner, clock)
    assert connections.admit(made)
    return made


@pytest.fixture(autouse=True)
def ended() -> list[Connection]:
    ENDED.clear()
    return ENDED


def test_of_an_owner_with_half_the_connection_that_has_waited_longest_makes_room(
    connections: Connections, ended: list[Connection]
) -> None:
    first, second, third, fourth = (connect(connections, "1") for _ in range(4))
    for busy in (first, second):
        busy.work()
    fourth.waiting_since_seconds -= 1
    fifth = connect(connections, "1")
    assert ended == [fourth]
    for busy in (third, fifth):
        busy.work()
    assert not connections.admit(connection("1")), "the exporter works on a request of each"


def test_a_new_connection_is_not_the_first_to_make_room_among_idle_ones(
    connections: Connections, ended: list[Connection], clock: Clock
) -> None:
    idle = [connect(connections, "1", clock) for _ in range(4)]
    for each in idle:
        each.rest()
    clock.seconds += 1
    new = [connect(connections, "1", clock) for _ in range(2)]
    assert ended == idle[:2]
    assert all(each.is_open for each in new)


def test_the_owner_with_the_most_makes_room_for_another_at_once(
    connections: Connections, ended: list[Connection]
) -> None:
    several = [connect(connections, "1") for _ in range(4)]
    few = [connect(connections, "10.0.0.1") for _ in range(3)]
    one = connect(connections, "2")
    for busy in (*several[:2], *few, one):
        busy.work()
    assert connections.admit(connection("3"))
    assert ended == [several[2]]


def test_a_busy_connection_makes_room_for_another_owner_if_all_are_busy(
    connections: Connections, ended: list[Connection]
) -> None:
    busy = [connect(connections, owner) for owner in "11112222"]
    for each in busy:
        each.work()
    assert connections.admit(connection("3"))
    assert ended == [busy[0]]
    assert not connections.admit(connection("2"))


def test_an_ended_connection_is_forgotten_once(connections: Connections) -> None:
    mine = [connect(connections, "1") for _ in range(4)]
    for each in mine:
        connections.remove(each)
        connections.remove(each)
    assert len(connections) == 0
    connect(connections, "1")


def test_a_user_a_machine_or_a_network_of_ipv6_addresses_is_an_owner() -> None:
    assert owner_of(Peer(uid=7)) == owner_of(Peer("127.0.0.1", uid=7)) != owner_of(Peer(uid=8))
    assert owner_of(Peer("10.1.2.3")) != owner_of(Peer("10.1.2.4"))
    assert owner_of(Peer("2001:db8::1")) == owner_of(Peer("2001:db8:0:0:ffff::2"))
    assert owner_of(Peer("2001:db8::1")) != owner_of(Peer("2001:db8:0:1::1"))
    assert owner_of(Peer("fe80::1%eth0")) == owner_of(Peer("fe80::2%eth0"))


def receive_half_a_body(connection: Connection) -> None:
    connection.start_request(2_000_000)
    connection.receive(100)
    connection.wait(LIMITS.request_seconds)
    connection.receive(1_000_000)


def answer_and_receive_two_bytes(connection: Connection) -> None:
    clock = connection.clock
    connection.rest()
    connection.receive(1)
    connection.clock = lambda: clock() + 9  # the second byte gives the client no more time
    connection.receive(1)
    connection.clock = clock


@pytest.mark.parametrize(
    ("step", "seconds"),
    [
        (lambda connection: None, 10),
        (lambda connection: connection.receive(1), 10),
        (receive_half_a_body, 10),
        (Connection.rest, 75),
        (answer_and_receive_two_bytes, 10),
    ],
)
def test_each_step_of_a_client_has_its_time(
    step: Callable[[Connection], None], seconds: float, connections: Connections, clock: Clock, ended: list[Connection]
) -> None:
    slow = connect(connections, "1", clock)
    step(slow)
    clock.seconds += seconds
    connections.end_late()
    assert not ended
    clock.seconds += 0.1
    connections.end_late()
    assert ended == [slow]


def test_the_exporter_has_any_time(connections: Connections, clock: Clock, ended: list[Connection]) -> None:
    held = connect(connections, "1", clock)
    held.rest()
    held.work()  # its next request had arrived before
    clock.seconds += 3600
    held.receive(1)  # the next request
    connections.end_late()
    assert not ended


def test_bytes_of_a_body_are_not_of_a_head_and_others_are_limited(ended: list[Connection]) -> None:
    one = connection("1")
    receive_half_a_body(one)
    one.receive(1_000_000)
    one.receive(LIMITS.head_bytes - 100)
    assert not ended
    one.receive(1)
    assert ended == [one]


def test_the_owner_with_the_most_unread_bytes_loses_first(connections: Connections, ended: list[Connection]) -> None:
    first, second, third, other = (connect(connections, owner) for owner in ("a", "a", "a", "b"))
    connections.start_reply(first, 30)
    connections.start_reply(second, 25)
    connections.start_reply(other, 40)
    assert not ended
    connections.start_reply(third, 10)
    assert ended == [first]
    assert not first.is_open
    for each in (second, other, third):
        each.unread_bytes = 0
    connections.start_reply(other, 1000)
    assert ended == [first], "a single reply is never too large"
