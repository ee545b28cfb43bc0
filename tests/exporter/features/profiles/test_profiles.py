"""The action `profile` in the dispatcher: how long it may run, and whose profile its result names."""

from __future__ import annotations

import pytest

from gpumem_client.wire.reason_codes import ReasonCode
from gpumem_exporter.actions.action_options import Target
from tests.support.builders.dispatching import Bench


@pytest.mark.parametrize("search_seconds", [0.0, 10.0])
def test_a_recording_and_a_search_may_end_ten_seconds_after_the_deadline(search_seconds: float) -> None:
    bench = Bench()
    wanted = {"duration_seconds": 60.0, "search_seconds": search_seconds, "deadline_seconds": 30.0}
    process = bench.put(1, actions=("profile",))
    action = bench.ask("profile", Target(pid=1), **wanted)
    (command,) = bench.dispatcher.commands(process)
    assert {name: getattr(command, name) for name in wanted} == wanted
    for seconds in (29.0, 31.0, 89.0, 91.0, 99.0 + search_seconds):
        bench.now = 100.0 + seconds
        bench.put(1, actions=("profile",), waiting=(action.id,))
        bench.dispatcher.expire()
        assert bench.current(action).state == "running"
    bench.now = 200.0 + search_seconds
    bench.dispatcher.expire()
    ended = bench.current(action)
    assert (ended.state, ended.results[0].reason_code) == ("expired", ReasonCode.NO_RESULT)
