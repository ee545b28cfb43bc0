"""Events are stored before they are acknowledged, survive restarts and errors of the disk, and each action has one."""

from __future__ import annotations

import json
import resource
import signal
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, OutOfMemory, Report, to_wire
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.builders.builders import UUIDS, report
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import patient, wait_for

EVENTS = "/api/v1/events"


def stores(exporter: ExporterProcess) -> bool:
    return bool(exporter.get("/health")["checks"]["events"]["status"] == "ok")


def oom_report(reporter: int, number: int) -> Report:
    """Return a report with one out-of-memory error, from a process in its own PID namespace."""
    who: dict[str, Any] = {"pid_namespace": 7, "session": f"session-{reporter}", "workload": f"w{reporter}"}
    oom = OutOfMemory(UUIDS[0], number, requested_bytes=number)
    return report(reporter, sequence=number, ooms=(oom,), **who)


def send(exporter: ExporterProcess, *numbers: int, reporter: int = 1) -> None:
    for number in numbers:
        exporter.report(oom_report(reporter, number))


def stored(exporter: ExporterProcess) -> list[tuple[str, int]]:
    return [(event["workload"], event["detail"]["number"]) for event in exporter.events(type="oom")]


def test_a_killed_exporter_has_stored_every_event_that_it_acknowledged(
    start_exporter: StartExporter, tmp_path: Path
) -> None:
    exporter = start_exporter(None, "--storage.path", str(tmp_path / "events"))
    threads, reporters, each = 4, 11, 50  # a process may have 60 errors a minute, and a user 600
    answered: set[tuple[str, int]] = set()
    shown: set[tuple[str, int]] = set()
    killed = threading.Event()

    def report_errors(thread: int) -> None:
        connection = Connection(exporter.url, timeout_seconds=patient(30.0))
        try:
            for reporter, number in product(range(1 + thread, reporters + 1, threads), range(1, each + 1)):
                body = json.dumps(to_wire(oom_report(reporter, number))).encode()
                answer = connection.request("POST", REPORTS_PATH, body, {"Content-Type": "application/json"})
                assert answer.status == 200, answer
                answered.add((f"w{reporter}", number))
                if len(answered) >= 300 and not killed.is_set():
                    exporter.signal(signal.SIGKILL)  # here, while the other threads are still writing
                    killed.set()
        except ExporterUnreachableError:
            return
        finally:
            connection.close()

    with ThreadPoolExecutor() as pool:
        sending = [pool.submit(report_errors, thread) for thread in range(threads)]
        with suppress(ExporterUnreachableError):
            while not killed.is_set():
                shown.update(stored(exporter))
        exporter.stop(signal.SIGKILL)
        for each_sent in sending:
            each_sent.result(patient(60))
    assert 300 <= len(answered) < reporters * each, "the exporter was not killed while it wrote"
    assert shown
    exporter.start()
    kept = stored(exporter)
    assert len(kept) == len(set(kept))
    assert answered <= set(kept)
    assert shown <= set(kept)
    # Reporters send unacknowledged errors again. Some of them were stored before the kill.
    for reporter in range(1, reporters + 1):
        send(exporter, *range(1, each + 1), reporter=reporter)
    kept = stored(exporter)
    everything = [(f"w{reporter}", n) for reporter in range(1, reporters + 1) for n in range(1, each + 1)]
    assert sorted(kept) == sorted(everything)
    assert stores(exporter)


def test_events_of_a_full_disk_are_stored_when_there_is_room_again(
    start_exporter: StartExporter, tmp_path: Path
) -> None:
    folder = tmp_path / "events"
    exporter = start_exporter(None, "--storage.path", str(folder), "--log.level", "error")
    numbers = iter(range(1, 10_000))
    send(exporter, *(next(numbers) for _ in range(20)))
    kept = stored(exporter)
    _, hard = resource.prlimit(exporter.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(exporter.pid, resource.RLIMIT_FSIZE, (8192, hard))  # a commit writes more pages than two
    while stores(exporter):
        send(exporter, next(numbers))
    refused = [next(numbers) for _ in range(20)]
    send(exporter, *refused)  # these are acknowledged as well
    check = exporter.get("/health")
    assert check["status"] == "degraded"
    assert str(folder) in check["checks"]["events"]["detail"]
    assert exporter.request("GET", "/metrics").status == 200
    assert len(exporter.processes()) == 1
    resource.prlimit(exporter.pid, resource.RLIMIT_FSIZE, (hard, hard))
    wait_for(lambda: stores(exporter), "the disk to work again")
    wait_for(lambda: stored(exporter)[-1] == ("w1", refused[-1]), "the queued events")
    assert stored(exporter) == [("w1", number) for number in range(1, refused[-1] + 1)]
    assert stored(exporter)[: len(kept)] == kept
    assert exporter.metrics().value("gpumem_events_dropped_total") == 0
    assert exporter.stop(signal.SIGKILL) == -signal.SIGKILL
    exporter.start()
    assert stored(exporter) == [("w1", number) for number in range(1, refused[-1] + 1)]


def test_a_second_exporter_stores_its_events_in_the_folder_when_the_first_one_has_stopped(
    start_exporter: StartExporter, tmp_path: Path
) -> None:
    folder = ("--storage.path", str(tmp_path / "events"))
    first, second = start_exporter(None, *folder), start_exporter(None, *folder)
    send(first, 1)
    send(second, 1, reporter=2)
    assert [stores(exporter) for exporter in (first, second)] == [True, False]
    assert first.stop() == 0
    wait_for(lambda: stores(second), "the folder")
    assert sorted(stored(second)) == [("w1", 1), ("w2", 1)]


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
