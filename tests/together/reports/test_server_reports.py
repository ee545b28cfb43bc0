"""`POST /api/v1/reports`: stored and rejected reports, held requests, and processes that end."""

from __future__ import annotations

import itertools
import json
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.delivery import Delivery, Outcome, Wakeup
from gpumem_client.reporter.settings import ReporterSettings
from gpumem_client.wire.protocol import REPORTS_PATH, CommandResult, DeviceResult, Report, to_wire
from gpumem_exporter.core.samples import ProcessMemory
from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.running_exporter import RunningExporter, problem, running_exporter
from tests.support.waiting import eventually, patient


@pytest.fixture(autouse=True)
def no_process_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "exporter" in request.fixturenames:
        runtime = request.getfixturevalue("exporter").runtime
        for process in runtime.snapshot().processes:
            runtime.store.forget(process.key)


def send_raw(exporter: RunningExporter, sent: Report) -> socket.socket:
    """Send a report without reading the reply."""
    body = json.dumps(to_wire(sent)).encode()
    head = f"POST {REPORTS_PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: "
    sock = socket.create_connection(("127.0.0.1", exporter.port), timeout=patient(30))
    sock.sendall(head.encode() + str(len(body)).encode() + b"\r\n\r\n" + body)
    return sock


def test_a_report_is_on_the_next_page(exporter: RunningExporter) -> None:
    exporter.provider.processes = {UUIDS[0]: (ProcessMemory(4711, 300 * MIB),)}
    devices = (sample(UUIDS[0], 100 * MIB, 50 * MIB, 10 * MIB),)
    answer = exporter.report(report(4711, devices=devices, rank="3"))
    assert answer.status == 200
    assert json.loads(answer.body) == {"report_interval_seconds": 1.0, "protocol": 1}
    labels = {"gpu": "0", "uuid": UUIDS[0], "pid": "4711", "workload": "train", "rank": "3"}
    assert exporter.sample("gpumem_torch_reserved_bytes", **labels) == 160 * MIB
    assert exporter.sample("gpumem_torch_reclaimable_bytes", **labels) == 50 * MIB
    sequence = itertools.count(2)

    def non_torch() -> float | None:
        exporter.report(report(4711, devices=devices, rank="3", sequence=next(sequence)))
        return exporter.sample("gpumem_torch_non_torch_bytes", **labels)

    eventually(non_torch, lambda value: value == 140 * MIB)
    exporter.provider.processes = {}


def test_a_process_reports_whatever_bytes_are_in_its_environment(exporter: RunningExporter) -> None:
    name = os.fsdecode(b"caf\xe9 \xc3\xa9")
    settings = ReporterSettings.resolve(url=exporter.url, environ={"GPUMEM_DEFAULT_WORKLOAD": name})
    delivery = Delivery(settings, Wakeup(), ErrorLog())
    sent = report(4711, devices=(sample(UUIDS[0], MIB),), workload=settings.workload, slurm_job_id=name)
    assert delivery.deliver(sent)[0] is Outcome.ACCEPTED
    delivery.close()
    assert exporter.sample("gpumem_torch_allocated_bytes", uuid=UUIDS[0], workload="caf? é") == MIB


def test_a_report_that_arrives_late_changes_nothing(exporter: RunningExporter) -> None:
    exporter.report(report(1, devices=(sample(allocated=2),), sequence=2))
    assert exporter.report(report(1, devices=(sample(allocated=1),), sequence=1)).status == 200
    assert exporter.sample("gpumem_torch_allocated_bytes", pid="1") == 2


def test_an_unknown_device_in_a_report_is_logged_once_and_the_known_ones_are_stored(
    exporter: RunningExporter, caplog: pytest.LogCaptureFixture
) -> None:
    devices = (sample(UUIDS[0], 100 * MIB), sample("GPU-of-another-node", 200 * MIB))
    for sequence in (1, 2, 3):
        assert exporter.report(report(1, devices=devices, sequence=sequence)).status == 200
    for session in ("b", "c"):  # a process may start sessions without end
        assert exporter.report(report(1, devices=devices, session=session, session_started_seconds=1e9)).status == 200
    shown = {dict(labels)["uuid"] for labels in exporter.metrics().samples["gpumem_torch_allocated_bytes"]}
    assert shown == {UUIDS[0]}
    logged = [vars(record)["fields"]["why"] for record in caplog.records if "GPU-of-another-node" in str(vars(record))]
    assert logged == ["the driver does not have the devices GPU-of-another-node"]


def test_a_process_beyond_the_limit_is_rejected_and_counted() -> None:
    with running_exporter(report_max_processes=2) as exporter:
        assert [exporter.report(report(pid)).status for pid in (1, 2)] == [200, 200]
        answer = exporter.report(report(3))
        assert "--report.max-processes" in problem(answer, 503)["detail"]
        assert int(answer.headers["retry-after"]) > 0
        assert exporter.report(report(1, sequence=2)).status == 200
        assert exporter.sample("gpumem_processes_dropped_total") == 1
        assert exporter.sample("gpumem_reports_total", outcome="dropped") == 1
        assert exporter.sample("gpumem_reporter_up", pid="3") is None


def test_reports_need_the_token_if_one_is_set(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("right\n")
    with running_exporter(report_token_file=str(token)) as exporter:
        problem(exporter.report(report(1)), 401)
        problem(exporter.report(report(1), Authorization="Bearer wrong"), 401)
        assert exporter.report(report(1), Authorization="Bearer right").status == 200
        assert exporter.sample("gpumem_reports_total", outcome="unauthorized") == 2
        assert exporter.act(action="empty_cache", target={"all": True}, dry_run=True).status == 200


def test_the_pid_of_the_sender_comes_from_the_kernel_on_a_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "exporter.sock"
    with running_exporter(unix=path) as exporter:
        assert exporter.report(report(4711), url=f"unix://{path}").status == 200
        assert exporter.host.lookups == [(4711, os.getpid())]
        assert exporter.report(report(4712)).status == 200
        assert set(exporter.host.lookups[1:]) == {(4712, None)}


def test_a_report_is_held_for_the_interval_and_no_longer() -> None:
    with running_exporter(report_interval=0.3) as exporter:
        started = time.monotonic()
        answer = exporter.report(report(1, hold_seconds=60.0))
        held = time.monotonic() - started
        assert json.loads(answer.body) == {"report_interval_seconds": 0.3, "protocol": 1}
        assert held >= 0.3


def test_an_action_reaches_a_held_report_at_once_and_its_result_ends_it() -> None:
    with running_exporter(report_interval=300, report_expiry=900) as exporter, ThreadPoolExecutor() as pool:
        before = report(1, devices=(sample(allocated=5, reclaimable=7),), hold_seconds=300.0)
        held = pool.submit(exporter.report, before)
        eventually(lambda: len(exporter.runtime.held_requests))
        submitted = pool.submit(exporter.act, action="empty_cache", target={"all": True}, wait_seconds=10)
        (command,) = json.loads(held.result(patient(30)).body)["commands"]
        assert command["action"] == "empty_cache"
        assert 0 < command["deadline_seconds"] <= 30
        result = CommandResult(
            command["id"], "done", duration_seconds=0.001, devices=(DeviceResult(UUIDS[0], 12, 5, freed_bytes=7),)
        )
        assert not submitted.done()
        after = report(1, devices=(sample(allocated=5),), sequence=2, results=(result,))
        assert exporter.report(after).status == 200
        answer = submitted.result(patient(30))
        assert answer.status == 200
        action = json.loads(answer.body)
        assert (action["state"], action["freed_bytes"], action["results"][0]["outcome"]) == ("done", 7, "done")
        assert exporter.sample("gpumem_action_freed_bytes_total", action="empty_cache") == 7


def test_a_repeated_final_report_removes_the_process() -> None:
    with running_exporter() as exporter:
        assert exporter.report(report(7)).status == 200
        assert exporter.report(report(7, final=True)).status == 200
        assert exporter.runtime.snapshot().processes == ()


def test_the_hold_ends_with_the_connection_and_no_command_is_lost() -> None:
    with running_exporter(report_interval=300, report_expiry=900) as exporter:
        sock = send_raw(exporter, report(1, devices=(sample(),), hold_seconds=300.0))
        eventually(lambda: len(exporter.runtime.held_requests))
        sock.close()
        eventually(lambda: len(exporter.runtime.held_requests), lambda held: held == 0)
        assert exporter.act(action="empty_cache", target={"pid": 1}, wait_seconds=0).status == 202
        answer = exporter.report(report(1, devices=(sample(),), sequence=2, hold_seconds=300.0))
        assert [command["action"] for command in json.loads(answer.body)["commands"]] == ["empty_cache"]


@pytest.mark.parametrize("died", [True, False])
def test_after_a_broken_connection_only_a_process_that_exited_is_removed(died: bool) -> None:
    with running_exporter(report_interval=300, report_expiry=900) as exporter:
        sock = send_raw(exporter, report(1, devices=(sample(),), hold_seconds=300.0))
        eventually(lambda: len(exporter.runtime.held_requests))
        if died:
            exporter.host.dead.add(1)
        sock.close()
        eventually(lambda: len(exporter.runtime.held_requests), lambda held: held == 0)
        expected = None if died else 1
        eventually(lambda: exporter.sample("gpumem_reporter_up", pid="1"), lambda up: up == expected)
