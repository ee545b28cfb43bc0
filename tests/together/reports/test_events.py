"""Events are stored before they are acknowledged, and survive restarts and errors of the disk."""

from __future__ import annotations

import errno
import json
import os
import re
import resource
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterUnreachableError
from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, OutOfMemory, Report, to_wire
from gpumem_exporter.events.log import MAX_WAITING, OWNER_SHARE
from gpumem_exporter.events.storage import FILE_NAME
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.builders import UUIDS, identity, report, sample
from tests.support.exporter_process import ExporterProcess
from tests.support.paths import REPOSITORY
from tests.support.running_exporter import RunningExporter, running_exporter
from tests.support.waiting import patient, wait_for

EVENTS = "/api/v1/events"
QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2", "--report.expiry", "30")


def health(exporter: ExporterProcess) -> dict[str, Any]:
    document: dict[str, Any] = exporter.get("/health")
    return document


def stores(exporter: ExporterProcess) -> bool:
    return bool(health(exporter)["checks"]["events"]["status"] == "ok")


def oom_report(reporter: int, number: int) -> bytes:
    """Encode a report with one out-of-memory error, from a process in its own PID namespace."""
    who = identity(reporter, pid_namespace=7, session=f"session-{reporter}", workload=f"w{reporter}")
    oom = OutOfMemory(UUIDS[0], number, requested_bytes=number)
    return json.dumps(to_wire(Report(who, sequence=number, ooms=(oom,)))).encode()


def post(connection: Connection, body: bytes) -> None:
    answer = connection.request("POST", REPORTS_PATH, body, {"Content-Type": "application/json"})
    assert answer.status == 200, answer


def send(exporter: ExporterProcess, *numbers: int, reporter: int = 1) -> None:
    connection = Connection(exporter.url, timeout_seconds=patient(30.0))
    for number in numbers:
        post(connection, oom_report(reporter, number))
    connection.close()


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
                post(connection, oom_report(reporter, number))
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


def test_health_shows_a_folder_that_cannot_be_created_until_it_can(
    start_exporter: StartExporter, tmp_path: Path
) -> None:
    in_the_way = tmp_path / "a file"
    in_the_way.write_text("")
    exporter = start_exporter(None, "--storage.path", str(in_the_way / "events"))
    wait_for(lambda: not stores(exporter), "the error")
    check = health(exporter)
    assert check["status"] == "degraded"
    assert os.strerror(errno.ENOTDIR) in check["checks"]["events"]["detail"]
    send(exporter, 1, 2)
    answer = exporter.request("GET", EVENTS)
    assert answer.status == 503
    assert answer.headers["retry-after"] == "1"
    in_the_way.unlink()
    wait_for(lambda: stores(exporter), "the folder")
    assert stored(exporter) == [("w1", 1), ("w1", 2)]
    assert (in_the_way / "events" / FILE_NAME).exists()


def test_events_beyond_the_queue_are_counted_as_dropped(start_exporter: StartExporter) -> None:
    exporter = start_exporter(None, "--storage.path", "/proc/gpumem", "--log.level", "error")
    wait_for(lambda: not stores(exporter), "the error")
    connection = Connection(exporter.url, timeout_seconds=patient(30.0))
    ooms = tuple(OutOfMemory(UUIDS[0], 1 + number) for number in range(50))
    reports = 1 + MAX_WAITING // OWNER_SHARE // len(ooms)
    for pid in range(1, 1 + reports):
        who = identity(pid, pid_namespace=7, session=f"session-{pid}")
        post(connection, json.dumps(to_wire(Report(who, sequence=1, ooms=ooms))).encode())
    connection.close()
    dropped = exporter.metrics().value("gpumem_events_dropped_total")
    assert 0 < dropped <= 3 * len(ooms)
    assert re.search(rf"\b{dropped:.0f}\b", health(exporter)["checks"]["events"]["detail"])


# --- real processes on the emulated node

RUN_OUT = "torch.empty(1 << 40, dtype=torch.uint8, device='cuda:1')"


def test_an_error_of_a_real_process_has_the_values_of_the_node_and_of_torch(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--storage.path", str(tmp_path / "events"))
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="greedy", rank=2)
    process.call("random_heap", device=1, seed=5)
    exporter.wait_for_processes(process.pid)
    for _ in range(2):
        process.exec(f"try:\n    {RUN_OUT}\nexcept torch.OutOfMemoryError: pass")
    stats, book = process.call("stats", device=1), node.books()[1]
    wait_for(lambda: len(exporter.events(type="oom")) == 2, "both errors")
    for number, event in enumerate(exporter.events(type="oom", pid=process.pid), 1):
        assert (event["gpu"], event["uuid"], event["pid"]) == ("1", book.uuid, process.pid)
        assert (event["workload"], event["rank"]) == ("greedy", "2")
        detail, allocator = event["detail"], event["detail"]["allocator"]
        assert detail["number"] == number
        assert detail["requested_bytes"] == 1 << 40
        assert detail["device_free_bytes"] == book.free_bytes
        assert detail["limit_bytes"] == book.total_bytes - book.reserved_bytes
        assert allocator["allocated_bytes"] == stats["allocated_bytes.all.current"]
        assert allocator["reserved_bytes"] == stats["reserved_bytes.all.current"]
        assert allocator["requested_bytes"] == stats["requested_bytes.all.current"]
        assert allocator["ooms"] == number
    lines = [line for line in exporter.log().splitlines() if f"requested_bytes={1 << 40}" in line]
    assert len(lines) == 2
    assert f"workload=greedy rank=2 pid={process.pid} gpu=1" in lines[0]
    assert f"requested_bytes={1 << 40} device_free_bytes={book.free_bytes}" in lines[0]
    exporter.metrics().assert_ledgers_add_up()


PROGRAM = f"""
import sys, torch
import gpumem_client as client
client.start(workload="doomed")
ballast = torch.empty(1 << 28, dtype=torch.uint8, device='cuda:1')
sys.stdin.readline()
{RUN_OUT}
"""


def test_a_process_that_dies_of_its_error_has_events_of_the_error_and_of_its_end(
    node: EmulatedNode, start_exporter: StartExporter, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM],
        env=node.environment(GPUMEM_EXPORTER_URL=exporter.url, PYTHONPATH=str(REPOSITORY)),
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_for(lambda: exporter.metrics().values("gpumem_torch_allocated_bytes") == [1 << 28], "its reports", 90.0)
        used = node.books()[1].processes[process.pid]
        wait_for(lambda: exporter.metrics().values("gpumem_process_memory_used_bytes", gpu="1") == [used], "a poll")
        _, stderr = process.communicate("now\n", timeout=patient(60))
    finally:
        process.kill()
        process.communicate()
    assert "OutOfMemoryError" in stderr
    wait_for(lambda: exporter.events(type="process_ended"), "its end")
    started, oom, ended = exporter.events(pid=process.pid)
    assert [started["type"], oom["type"], ended["type"]] == ["process_started", "oom", "process_ended"]
    assert {event["workload"] for event in (started, oom, ended)} == {"doomed"}
    assert oom["detail"]["requested_bytes"] == 1 << 40
    assert oom["detail"]["allocator"]["allocated_bytes"] == 1 << 28
    (row,) = [row for row in ended["detail"]["devices"] if row["gpu"] == "1"]
    assert row["uuid"] == node.books()[1].uuid
    assert row["used_bytes"] == used
    assert row["allocated_bytes"] == 1 << 28
    assert row["non_torch_bytes"] == used - row["reserved_bytes"]
    wait_for(lambda: not exporter.metrics().states_of(process.pid), "its series to go")
    exporter.metrics().assert_ledgers_add_up()


def test_a_process_that_survives_a_killed_exporter_has_started_once(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--storage.path", str(tmp_path / "events"))
    lives, dies = (start_torch(GPUMEM_EXPORTER_URL=exporter.url) for _ in range(2))
    for process in (lives, dies):
        process.call("start_client")
        process.call("alloc", nbytes=3 << 20, device=0)
    exporter.wait_for_processes(lives.pid, dies.pid)
    dies.kill()
    wait_for(lambda: exporter.events(type="process_ended"), "its end")
    assert exporter.stop(signal.SIGKILL) == -signal.SIGKILL
    exporter.start()
    exporter.wait_for_processes(lives.pid)
    exporter.act("empty_cache", target={"pid": lives.pid})
    (ended,) = exporter.events(type="process_ended")
    assert ended["pid"] == dies.pid
    died = ended["detail"]["reason"]
    assert ended["detail"]["devices"][0]["allocated_bytes"] == 3 << 20
    assert [event["type"] for event in exporter.events(pid=lives.pid)] == ["process_started", "action"]
    lives.call("stop_client")
    wait_for(lambda: len(exporter.events(type="process_ended")) == 2, "its last report")
    last = exporter.events(pid=lives.pid)[-1]
    assert last["type"] == "process_ended"
    assert "" != died != last["detail"]["reason"] != ""
    assert last["detail"]["devices"][0]["allocated_bytes"] == 3 << 20


def test_a_lost_device_is_recorded_once_and_its_return_also_after_a_restart(
    node: EmulatedNode, start_exporter: StartExporter, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--storage.path", str(tmp_path / "events"))

    def changes() -> list[tuple[str, str]]:
        return [(event["type"], event["uuid"]) for event in exporter.events(type="device_lost,device_returned")]

    assert changes() == []
    lost, uuid = ("device_lost", node.uuid(1)), node.uuid(1)
    node.lose_device(1)
    wait_for(lambda: changes() == [lost], "the loss")
    (event,) = exporter.events(type="device_lost")
    assert event["gpu"] == "1"
    assert event["detail"]["error"]
    exporter.metrics().assert_ledgers_add_up()
    assert exporter.stop(signal.SIGKILL) == -signal.SIGKILL
    exporter.start()  # the device is still lost, so there is no new event
    send(exporter, 1)
    assert changes() == [lost]
    assert exporter.stop() == 0
    node.heal_device(1)
    exporter.start()
    wait_for(lambda: changes() == [lost, ("device_returned", uuid)], "the return")
    exporter.metrics().assert_ledgers_add_up()


# --- the route


@pytest.fixture
def served() -> Any:
    with running_exporter() as exporter:
        yield exporter


def numbers(exporter: RunningExporter, query: str = "") -> list[int]:
    found = exporter.document(f"{EVENTS}?type=oom{query}")["events"]
    return [event["detail"]["number"] for event in found]


def test_the_route_pages_by_a_cursor_and_filters(served: RunningExporter) -> None:
    for pid in (1, 2):
        ooms = tuple(OutOfMemory(UUIDS[0], number) for number in range(1, 6))
        served.report(report(pid, devices=(sample(),), session=str(pid), ooms=ooms))
    assert numbers(served) == [1, 2, 3, 4, 5] * 2
    assert numbers(served, "&pid=2") == [1, 2, 3, 4, 5]
    page = served.document(f"{EVENTS}?type=oom&pid=1&limit=3&after=0")
    assert (len(page["events"]), page["more"]) == (3, True)
    rest = served.document(f"{EVENTS}?type=oom&pid=1&limit=3&after={page['next_after']}")
    assert [event["detail"]["number"] for event in rest["events"]] == [4, 5]
    assert not rest["more"]
    assert numbers(served, "&limit=2") == [4, 5]
    first = page["events"][0]
    assert len(numbers(served, f"&since={first['time']}&limit=1000")) == 10
    assert numbers(served, "&since=2999-01-01T00:00:00Z") == []
    assert served.request("HEAD", EVENTS).status == 200


def test_an_error_can_be_read_when_its_report_is_acknowledged(served: RunningExporter) -> None:
    for number in range(1, 51):
        served.report(report(1, devices=(sample(),), sequence=number, ooms=(OutOfMemory(UUIDS[0], number),)))
        assert numbers(served, "&limit=1") == [number]
