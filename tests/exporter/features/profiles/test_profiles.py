"""The action `profile` in the dispatcher: how long it may run, and whose profile its result names."""

from __future__ import annotations

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action import Action
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.core.caller import Caller
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


def test_a_process_that_reports_no_more_ends_the_wait_after_the_duration() -> None:
    bench = Recording()
    bench.deliver()
    assert bench.after(90.0, reports=False).state == "running"
    assert bench.after(91.0, reports=False).state == "expired"


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


def test_only_the_process_with_the_command_sends_its_profile_and_the_result_names_no_other() -> None:
    bench = Recording()
    assert bench.dispatcher.running_profile(bench.first, bench.action.id) is None, "not delivered"
    bench.deliver()
    assert bench.dispatcher.running_profile(bench.second, bench.action.id) is None
    assert bench.dispatcher.running_profile(bench.first, "another") is None
    found = bench.dispatcher.running_profile(bench.first, bench.action.id)
    assert found is not None
    found[1].profile = "kept"
    bench.answer(bench.first, bench.action)
    assert [result.profile for result in bench.current(bench.action).results] == ["kept"]
    assert bench.dispatcher.running_profile(bench.first, bench.action.id) is None


def test_an_unlisted_action_is_known_by_its_id_alone() -> None:
    bench = Bench()
    request = ActionRequest("profile", Target(pid=1))
    action = bench.dispatcher.submit(request, requested_by=Caller.policy("rule"), unlisted=True)
    bench.dispatcher.commands(bench.first)
    bench.answer(bench.first, action)
    assert bench.current(action).finished
    assert bench.dispatcher.recent() == ()
