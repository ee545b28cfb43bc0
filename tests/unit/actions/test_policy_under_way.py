from __future__ import annotations

from dataclasses import replace

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.actions.request import DEFAULT_ACTIONS, ActionRequest, Target
from gpumem_exporter.actions.terminate import Terminator
from gpumem_exporter.core.store import Store
from gpumem_exporter.wire.protocol import CommandResult
from tests.support.builders import UNLIMITED, NobodyHost, report, sample


def test_an_action_is_under_way_in_a_process_from_the_request_to_its_result() -> None:
    store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=10)
    dispatcher = Dispatcher(
        store,
        allowed=frozenset(DEFAULT_ACTIONS),
        clock=lambda: 100.0,
        wall_clock=lambda: 1e9,
        on_finished=lambda action: None,
        terminator=Terminator(NobodyHost()),
        limits=UNLIMITED,
    )
    one, _ = (
        store.put_report(
            report(pid, devices=(sample(),), workload=f"w{pid}"), host_pid=pid, now_seconds=100.0, now_unix_seconds=1e9
        )
        for pid in (1, 2)
    )
    assert dispatcher.under_way() == set()
    action = dispatcher.submit(
        ActionRequest("empty_cache", Target(workload="w1")), requested_by=Caller.policy("somebody")
    )
    assert dispatcher.under_way() == {one.key}
    result = CommandResult(action.id, "done")
    dispatcher.take_results(replace(one, report=replace(one.report, results=(result,))))
    assert dispatcher.under_way() == set()
