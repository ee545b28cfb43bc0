"""Every action has one outcome, the same in the reply, the audit log, the events and the counters."""

from __future__ import annotations

import json
import signal
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import Connection
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import patient, wait_for

ACTIONS = 500
THREADS = 16
PATIENCE_SECONDS = 90.0


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter, tmp_path: Path) -> ExporterProcess:
    storage = ("--storage.path", str(tmp_path / "events"))
    return start_exporter(node, *QUICK, *storage, "--log.level", "warning")


@pytest.fixture
def processes(exporter: ExporterProcess, start_torch: StartTorch) -> list[TorchProcess]:
    started = [start_torch(GPUMEM_EXPORTER_URL=exporter.url) for _ in range(2)]
    for rank, process in enumerate(started):
        process.call("start_client", workload="train", rank=rank)
        process.call("alloc", nbytes=MIB)
    exporter.wait_for_processes(*(process.pid for process in started))
    return started


def ask_all(exporter: ExporterProcess, pids: Sequence[int], round_: str) -> list[Any]:
    """Request this number of clears from several threads, each with its own key, until each is answered."""

    def ask(numbers: range) -> list[Any]:
        connection = Connection(exporter.url, timeout_seconds=patient(70.0))
        answered = []
        for number in numbers:
            body = {"action": "empty_cache", "target": {"pid": pids[number % len(pids)]}, "wait_seconds": 60}
            headers = {"Content-Type": "application/json", "Idempotency-Key": f"{round_}-{number}"}

            def done(body: dict[str, Any] = body, headers: dict[str, str] = headers) -> bytes | None:
                try:
                    answer = connection.request("POST", "/api/v1/actions", json.dumps(body).encode(), headers)
                except ExporterUnreachableError:
                    return None
                if answer.status == 200:
                    return answer.body
                # after a restart, no process may have reported yet
                assert answer.status == 404, answer
                return None

            answered.append(json.loads(wait_for(done, f"the answer to action {number}", PATIENCE_SECONDS) or b""))
        connection.close()
        return answered

    with ThreadPoolExecutor(THREADS) as pool:
        return [
            action for found in pool.map(ask, [range(i, ACTIONS, THREADS) for i in range(THREADS)]) for action in found
        ]


def flushes(processes: Sequence[TorchProcess]) -> int:
    return sum(process.call("stats", device=0)["num_sync_all_streams"] for process in processes)


def ends(exporter: ExporterProcess, ids: Iterable[str]) -> list[tuple[str, str]]:
    """Return the id and the state of each event of these actions."""
    wanted, found = set(ids), (event["detail"] for event in exporter.events(type="action"))
    return [(detail["id"], detail["state"]) for detail in found if detail["id"] in wanted]


def test_concurrent_actions_run_once_each_and_have_one_outcome_even_if_the_exporter_is_killed(
    exporter: ExporterProcess, processes: list[TorchProcess]
) -> None:
    pids = [process.pid for process in processes]
    before = flushes(processes)
    done = {reply["id"]: reply["state"] for reply in ask_all(exporter, pids, "first")}
    assert flushes(processes) - before == ACTIONS
    assert Counter(done.values()) == {"done": ACTIONS}
    assert sorted(ends(exporter, done)) == sorted(done.items())
    metrics = exporter.metrics()
    assert metrics.value("gpumem_actions_total", action="empty_cache", outcome="done") == ACTIONS
    assert metrics.value("gpumem_action_duration_seconds_count", action="empty_cache") == ACTIONS
    logged = exporter.get("/api/v1/actions?limit=1000")["actions"]
    assert {action["id"] for action in logged} == done.keys()

    before = flushes(processes)
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask_all, exporter, pids, "second")
        for share in (0.2, 0.6):
            wait_for(lambda share=share: flushes(processes) - before > share * ACTIONS, "a share of the actions", 120.0)  # type: ignore[misc]
            exporter.stop(signal.SIGKILL)
            exporter.start()
        replies = asked.result()
    outcomes = {reply["id"]: reply["state"] for reply in replies}
    assert len(outcomes) == len(replies) == ACTIONS
    # an interrupted action may have run: its outcome is unknown
    assert Counter(outcomes.values())["done"] <= flushes(processes) - before <= ACTIONS
    assert set(outcomes.values()) <= {"done", "failed"}
    cut_off = [reply for reply in replies if reply["state"] == "failed"]
    assert {row["outcome"] for reply in cut_off for row in reply["results"]} <= {"failed"}
    assert all(row["reason"] for reply in cut_off for row in reply["results"])
    assert len(cut_off) <= 2 * THREADS
    assert sorted(ends(exporter, outcomes)) == sorted(outcomes.items())
