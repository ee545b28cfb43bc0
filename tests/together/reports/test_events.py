"""Events are stored before they are acknowledged, and survive restarts and errors of the disk."""

from __future__ import annotations

import json
import resource
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, OutOfMemory, Report, to_wire
from tests.conftest import StartExporter
from tests.support.builders import UUIDS, report
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import patient, wait_for

EVENTS = "/api/v1/events"


def health(exporter: ExporterProcess) -> dict[str, Any]:
    document: dict[str, Any] = exporter.get("/health")
    return document


def stores(exporter: ExporterProcess) -> bool:
    return bool(health(exporter)["checks"]["events"]["status"] == "ok")


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


# --- acknowledged events


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


# --- errors of the disk


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
    check = health(exporter)
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


