"""The action `profile` in the dispatcher: how long it may run, and whose profile its result names."""

from __future__ import annotations

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import Target
from tests.support.dispatching import Bench


class Recording(Bench):
    """A recording of 60 seconds in the process 1, which may start within 30 seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.first = self.put(1, actions=("profile",))
        self.action = self.ask("profile", Target(pid=1), duration_seconds=60.0, deadline_seconds=30.0)

    def deliver(self) -> None:
        (command,) = self.dispatcher.commands(self.first)
        assert (command.duration_seconds, command.deadline_seconds) == (60.0, 30.0)

    def after(self, seconds: float, *, reports: bool = True) -> Action:
        """Return the action when this time has passed since the request."""
        self.now = 100.0 + seconds
        if reports:
            self.first = self.put(1, actions=("profile",), waiting=(self.action.id,))
        self.dispatcher.expire()
        return self.current(self.action)


def test_a_recording_may_end_its_duration_and_ten_seconds_after_the_deadline() -> None:
    bench = Recording()
    bench.deliver()
    assert [bench.after(seconds).state for seconds in (29.0, 31.0, 89.0, 91.0, 99.0)] == ["running"] * 5
    ended = bench.after(100.0)
    assert (ended.state, ended.results[0].reason_code) == ("expired", ReasonCode.NO_RESULT)


def test_a_search_may_take_its_time_after_the_recording() -> None:
    bench = Bench()
    first = bench.put(1, actions=("profile",))
    action = bench.ask("profile", Target(pid=1), duration_seconds=60.0, search_seconds=10.0, deadline_seconds=30.0)
    (command,) = bench.dispatcher.commands(first)
    assert command.search_seconds == 10.0
    for seconds, state in ((109.0, "running"), (111.0, "expired")):
        bench.now = 100.0 + seconds
        bench.put(1, actions=("profile",), waiting=(action.id,))
        bench.dispatcher.expire()
        assert bench.current(action).state == state
