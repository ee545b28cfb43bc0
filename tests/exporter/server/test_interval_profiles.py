"""When `--profile.interval` takes the profile of which process."""

from __future__ import annotations

from gpumem_exporter.server.background.interval_profiles import IntervalProfiles
from tests.support.dispatching import Bench

HOUR = 3600.0


class Node(Bench):
    """A node whose processes report all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.store.report_expiry_seconds = 10 * HOUR
        self.first = self.put(1, actions=("profile",))
        self.second = self.put(2, actions=("empty_cache", "profile"))
        self.put(3, actions=("empty_cache",))
        self.put(4)  # of a client that supports no profiles, and lists no actions
        self.dispatcher = self.build()
        self.profiles = IntervalProfiles(
            self.dispatcher,
            lambda: self.store.snapshot(self.now),
            interval_seconds=HOUR,
            clock=lambda: self.now,
        )

    def tick(self, seconds: float) -> list[int]:
        """Let time pass, and return the pids of the processes that then have a command."""
        self.now += seconds
        self.dispatcher.expire()
        self.profiles.tick()
        return sorted(key.pid for key in self.dispatcher.under_way())


def test_each_process_has_its_turn_once_in_an_interval_and_one_at_a_time() -> None:
    node = Node()
    assert node.tick(0) == []
    assert node.tick(HOUR - 1) == []
    assert node.tick(1) == [1]
    assert node.tick(1) == [1]  # the next one waits until it has ended
    assert node.tick(40) == []  # the first one did not answer in time; the second one has its turn later
    assert node.tick(HOUR / 4 - 42) == []
    assert node.tick(1) == [2]
    (command,) = node.dispatcher.commands(node.second)
    assert (command.action, command.duration_seconds) == ("profile", 0.0)
    assert node.dispatcher.recent() == ()
    assert node.tick(HOUR / 2) == []
    assert node.tick(HOUR / 4) == [1]


def test_a_new_session_waits_for_an_interval() -> None:
    node = Node()
    node.tick(0)
    node.put(1, actions=("profile",), session="second", session_started_seconds=50.0)
    node.tick(HOUR - 1)
    assert node.tick(1) == [2]


def test_processes_that_a_user_invents_do_not_delay_those_of_others() -> None:
    node = Node()
    for pid in range(100, 106):
        node.put(pid, actions=("profile",), owner_uid=1002)
    node.put(200, actions=("profile",), owner_uid=1001)
    assert node.tick(0) == []
    node.tick(HOUR)
    turns = [pid for _ in range(12) for pid in node.tick(HOUR / 40)]
    assert 200 in turns
