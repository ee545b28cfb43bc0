"""What `clear --all --dry-run` prints, from the reports of a node to the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gpumem_client.wire.protocol import MODES, DeviceSample
from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.request import ActionRequest, Target
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.server.api.actions import action_document
from tests.support.builders import UUIDS, sample
from tests.support.dispatching import Bench
from tests.support.golden import assert_golden, printed

GIB = 1 << 30


def cache(device: int, allocated: float, reclaimable: float, idle: float | None) -> DeviceSample:
    measured = sample(UUIDS[device], int(allocated * GIB), int(reclaimable * GIB))
    return replace(measured, idle_cache_bytes=None if idle is None else int(idle * GIB))


def node_with_jobs() -> Bench:
    bench = Bench()
    for process in (bench.first, bench.second):
        bench.store.forget(process.key)
    trains: dict[str, Any] = {"workload": "llm-pretrain", "step": 41, "step_seconds": 0.5, "modes": MODES}
    bench.put(50101, rank="0", devices=(cache(0, 40, 10, 1),), **trains)
    bench.put(50102, rank="1", devices=(cache(1, 40, 10, 1.2),), **trains)
    bench.put(50200, workload="notebook-alice", rank="", devices=(cache(0, 2, 21.5, 21.5), cache(1, 1, 2, 2)))
    bench.put(50300, workload="rag-indexer", rank="", devices=(cache(1, 6, 0.5, None),))
    bench.put(50400, workload="old-client", rank="", devices=(cache(1, 1, 1, 1),), actions=("reset_peak",))
    return bench


def test_the_output_of_a_dry_run_of_every_clear() -> None:
    bench = node_with_jobs()
    operator = Caller.policy("test")
    request = ActionRequest("empty_cache", Target(all=True), dry_run=True)
    suggestion = bench.dispatcher.suggest_clears(request, requested_by=operator, free_deadline=True)
    action = bench.dispatcher.submit(replace(request, target=suggestion.target), requested_by=operator)
    document = action_document(action, suggestion.requests)
    assert_golden("dry-run.txt", "\n".join([*printed(*action_tables(document)), ""]))
