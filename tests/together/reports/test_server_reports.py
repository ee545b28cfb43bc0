"""`POST /api/v1/reports`: stored and rejected reports, held requests, and processes that end."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from gpumem_client.guest_safety import ErrorLog
from gpumem_client.reporter.delivery import Delivery, Outcome, Wakeup
from gpumem_client.reporter.reporter_settings import ReporterSettings
from gpumem_client.wire.protocol import REPORTS_PATH, CommandResult, DeviceResult, Report, to_wire
from tests.support.builders.builders import MIB, UUIDS, report, sample
from tests.support.servers.running_exporter import RunningExporter, problem, running_exporter
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


def test_a_process_reports_whatever_bytes_are_in_its_environment(exporter: RunningExporter) -> None:
    name = os.fsdecode(b"caf\xe9 \xc3\xa9")
    settings = ReporterSettings.resolve(url=exporter.url, environ={"GPUMEM_DEFAULT_WORKLOAD": name})
    delivery = Delivery(settings, Wakeup(), ErrorLog())
    sent = report(4711, devices=(sample(UUIDS[0], MIB),), workload=settings.workload, slurm_job_id=name)
    assert delivery.deliver(sent)[0] is Outcome.ACCEPTED
    delivery.close()
    assert exporter.sample("gpumem_torch_allocated_bytes", uuid=UUIDS[0], workload="caf? é") == MIB


def test_a_report_that_arrives_late_changes_nothing(exporter: RunningExporter) -> None:
    exporter.report(report(4713, devices=(sample(allocated=2),), sequence=2))
    assert exporter.report(report(4713, devices=(sample(allocated=1),), sequence=1)).status == 200
    assert exporter.sample("gpumem_torch_allocated_bytes", pid="4713") == 2


def test_a_report_that_is_read_after_the_final_one_starts_no_process(exporter: RunningExporter) -> None:
    for sequence, final in ((1, False), (3, True), (2, False)):
        assert exporter.report(report(4712, devices=(sample(),), sequence=sequence, final=final)).status == 200
    assert not exporter.runtime.snapshot().processes
    assert exporter.report(report(4712, devices=(sample(),), sequence=4)).status == 200
    assert len(exporter.runtime.snapshot().processes) == 1, "its reporter goes on"


def test_an_action_over_the_limit_is_429_with_a_retry_after() -> None:
    with running_exporter(action_process_limit=2) as exporter:
        exporter.report(report(1, devices=(sample(),)))
        answers = [exporter.act(action="empty_cache", target={"pid": 1}, wait_seconds=0) for _ in range(3)]
        assert [answer.status for answer in answers] == [202, 202, 429]
        assert 1 <= int(answers[2].headers["retry-after"]) <= 30


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


def test_a_broken_connection_loses_no_command_and_removes_only_a_process_that_exited() -> None:
    with running_exporter(report_interval=300, report_expiry=900) as exporter:
        sock = send_raw(exporter, report(1, devices=(sample(),), hold_seconds=300.0))
        eventually(lambda: len(exporter.runtime.held_requests))
        sock.close()
        eventually(lambda: len(exporter.runtime.held_requests), lambda held: held == 0)
        assert exporter.sample("gpumem_reporter_up", pid="1") == 1, "the process has not exited"
        submitted = exporter.act(action="empty_cache", target={"pid": 1}, wait_seconds=0)
        assert (submitted.status, exporter.document(submitted.headers["location"])["state"]) == (202, "queued")
        answer = exporter.report(report(1, devices=(sample(),), sequence=2, hold_seconds=300.0))
        assert [command["action"] for command in json.loads(answer.body)["commands"]] == ["empty_cache"]
        dying = send_raw(exporter, report(2, devices=(sample(),), hold_seconds=300.0))
        eventually(lambda: len(exporter.runtime.held_requests))
        exporter.host.dead.add(2)
        dying.close()
        eventually(lambda: exporter.sample("gpumem_reporter_up", pid="2"), lambda up: up is None)


Spoil = Callable[[dict[str, Any]], object]
BAD_REPORTS: dict[str, tuple[int, str, str, Spoil]] = {
    "a number of 2^63": (422, "invalid", "devices.0.reserved_bytes", lambda d: _device(d).update(reserved_bytes=2**63)),
    "more allocated than reserved": (
        *(422, "invalid", "devices.0.allocated_bytes"),
        lambda d: _device(d).update(allocated_bytes=21 * MIB),
    ),
    "an unknown device": (422, "unknown_device", "devices.0.uuid", lambda d: _device(d).update(uuid="GPU-elsewhere")),
    "an unknown outcome": (
        *(422, "invalid", "results.0.outcome"),
        lambda d: d.update(results=[{"id": "a", "outcome": "melted"}]),
    ),
    "an older session of the pid": (
        *(409, "superseded", ""),
        lambda d: d["process"].update(session="another", session_started_seconds=99.0),
    ),
    "an older process of the pid": (
        *(409, "superseded", ""),
        lambda d: d["process"].update(session="another", session_started_seconds=200.0, start_time_ticks=999),
    ),
    "a process too many": (503, "dropped", "", lambda d: d["process"].update(pid=2)),
}


def _device(document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = document["devices"][0]
    return found


def state(exporter: RunningExporter) -> tuple[Any, dict[Any, float]]:
    """Return what the exporter shows, without times and the use of its own process."""
    processes = exporter.document("/api/v1/processes")["processes"]
    for process in processes:
        del process["sample_age_seconds"]
    own = ("gpumem_scrape_collector_duration_seconds", "process_", "python_")
    samples = {
        (name, labels): value
        for name, found in exporter.metrics().samples.items()
        for labels, value in found.items()
        if not name.startswith(own)
    }
    return (processes, exporter.document("/api/v1/devices")), samples


def test_an_invalid_report_changes_only_the_count_of_refusals() -> None:
    quiet: dict[str, Any] = {"collect_interval": 3600, "report_interval": 3600, "report_expiry": 36000}
    who: dict[str, Any] = {"session_started_seconds": 100.0, "start_time_ticks": 1000}
    with running_exporter(report_max_processes=1, **quiet) as exporter:
        assert exporter.report(report(1, devices=(sample(UUIDS[0], 3 * MIB, 17 * MIB),), **who)).status == 200
        eventually(lambda: exporter.sample("gpumem_events_total", type="process_started"), lambda count: count == 1)
        eventually(lambda: "gpumem_health_check_ok" in exporter.metrics().samples)
        for sequence, (name, (status, outcome, field, spoil)) in enumerate(BAD_REPORTS.items(), start=2):
            document = to_wire(report(1, devices=(sample(UUIDS[0], 4 * MIB, 16 * MIB),), sequence=sequence, **who))
            spoil(document)
            documents, before = state(exporter)
            refused = problem(exporter.request("POST", REPORTS_PATH, document), status)
            assert not field or [error["field"].startswith(field) for error in refused["errors"]] == [True], name
            shown, after = state(exporter)
            assert shown == documents, name
            changed = {key: value - before.get(key, 0) for key, value in after.items() if value != before.get(key)}
            counted = {key: value for key, value in changed.items() if key[0] != "gpumem_reports_created"}
            expected: dict[Any, float] = {("gpumem_reports_total", frozenset({("outcome", outcome)})): 1}
            if outcome == "dropped":
                expected["gpumem_processes_dropped_total", frozenset()] = 1
            assert counted == expected, name
