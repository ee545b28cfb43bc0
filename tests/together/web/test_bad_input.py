"""Invalid requests to a real exporter change nothing: /metrics before and after differ only in the count of refusals.

Polls and reports are an hour apart, so that the pages can be compared line by line. Unit tests check the rules of each
field and their messages.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire import procfs
from gpumem_client.wire.http import Answer
from gpumem_client.wire.protocol import REPORTS_PATH, DeviceSample, ProcessIdentity, Report, to_wire
from tests.emulation.node import MIB, EmulatedNode
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

QUIET = ("--collect.interval", "3600", "--report.interval", "3600", "--report.expiry", "36000")

Change = Callable[[dict[str, Any]], Any]


class QuietExporter:
    """An exporter that knows one process, and valid reports of it."""

    def __init__(self, node: EmulatedNode, folder: Path) -> None:
        self.node = node
        self.exporter = ExporterProcess(folder, *QUIET, "--report.max-processes", "1", environment=node.environment())
        self._sequence = 0
        self.identity = ProcessIdentity(
            pid=os.getpid(),
            start_time_ticks=procfs.start_time_ticks(),
            pid_namespace=procfs.pid_namespace(),
            session="the current session",
            session_started_seconds=100.0,
            workload="kept",
        )
        assert self.post(self.good_report()).status == 200
        assert self.exporter.metrics().value("gpumem_torch_allocated_bytes") == 3 * MIB
        started = {"type": "process_started"}
        wait_for(lambda: self.exporter.metrics().value("gpumem_events_total", **started) == 1, "the event of its start")
        wait_for(lambda: "gpumem_health_check_ok{" in "\n".join(self.page()), "the checks of the first second")

    def good_report(self) -> dict[str, Any]:
        """The next report of the known process."""
        self._sequence += 1
        sample = DeviceSample(
            uuid=self.node.uuid(0), allocated_bytes=3 * MIB, reserved_bytes=20 * MIB, reclaimable_bytes=MIB
        )
        return to_wire(Report(self.identity, self._sequence, devices=(sample,), actions=("empty_cache",)))

    def post(self, document: Any) -> Answer:
        return self.exporter.request("POST", REPORTS_PATH, document)

    def page(self) -> list[str]:
        """The lines of a scrape, without its duration and the exporter's CPU time and memory."""
        lines = self.exporter.request("GET", "/metrics").body.decode().splitlines()
        return [
            line
            for line in lines
            if not line.startswith(("gpumem_scrape_collector_duration_seconds{", "process_", "python_gc_"))
        ]

    def state(self) -> tuple[Any, ...]:
        """The JSON documents, without times."""
        processes = self.exporter.get("/api/v1/processes")["processes"]
        for process in processes:
            del process["sample_age_seconds"]
        return processes, self.exporter.get("/api/v1/devices")


@pytest.fixture(scope="module")
def quiet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[QuietExporter]:
    folder = tmp_path_factory.mktemp("quiet")
    with EmulatedNode(folder / "node") as node:
        # this process has bytes on the device, so that the ledger is not empty
        node.set_process(os.getpid(), 0, 500 * MIB)
        quiet_exporter = QuietExporter(node, folder)
        yield quiet_exporter
        print(quiet_exporter.exporter.log())
        quiet_exporter.exporter.close()


def changed_lines(before: list[str], after: list[str]) -> dict[str, tuple[float, float]]:
    """The series with a new value and new series."""
    was, is_now = ({line.rpartition(" ")[0]: line.rpartition(" ")[2] for line in page} for page in (before, after))
    assert was.keys() <= is_now.keys()
    return {name: (float(was.get(name, 0)), float(value)) for name, value in is_now.items() if was.get(name) != value}


def assert_refused(answer: Answer, status: int) -> dict[str, Any]:
    problem: dict[str, Any] = json.loads(answer.body)
    assert (answer.status, problem["status"]) == (status, status), problem
    assert answer.headers["content-type"] == "application/problem+json"
    assert problem["detail"]
    return problem


def put(*path: str | int, value: Any) -> Change:
    def change(report: dict[str, Any]) -> None:
        *way, last = path
        target: Any = report
        for key in way:
            target = target[key]
        target[last] = value

    return change


def another_session(started_seconds: float, start_time_ticks: int = 0) -> Change:
    """Return a change to another reporter in the same process."""

    def change(report: dict[str, Any]) -> None:
        report["process"] |= {
            "session": "another",
            "session_started_seconds": started_seconds,
            "start_time_ticks": report["process"]["start_time_ticks"] + start_time_ticks,
        }

    return change


SAMPLE = ("devices", 0)
BAD_REPORTS: dict[str, tuple[int, str, str, Change]] = {
    "a number of 2^63": (422, "invalid", "devices.0.reserved_bytes", put(*SAMPLE, "reserved_bytes", value=2**63)),
    "more allocated than reserved": (
        *(422, "invalid", "devices.0.allocated_bytes"),
        put(*SAMPLE, "allocated_bytes", value=21 * MIB),
    ),
    "an unknown device": (422, "unknown_device", "devices.0.uuid", put(*SAMPLE, "uuid", value="GPU-elsewhere")),
    "no process": (422, "invalid", "process", put("process", value=None)),
    "a result with an unknown outcome": (
        *(422, "invalid", "results.0.outcome"),
        put("results", value=[{"id": "a", "outcome": "melted"}]),
    ),
    "an older session of the same pid": (409, "superseded", "", another_session(99.0)),
    "an older process of the same pid": (409, "superseded", "", another_session(200.0, start_time_ticks=-1)),
    "a process too many": (503, "dropped", "", put("process", "pid", value=os.getppid())),
}


@pytest.mark.parametrize("name", BAD_REPORTS)
def test_an_invalid_report_changes_only_the_count_of_refusals(quiet: QuietExporter, name: str) -> None:
    status, outcome, field, spoil = BAD_REPORTS[name]
    report = quiet.good_report()
    report["devices"][0] |= {"allocated_bytes": 4 * MIB, "ooms": 9}  # valid new values, which must not be stored
    spoil(report)
    before, state = quiet.page(), quiet.state()
    problem = assert_refused(quiet.post(report), status)
    if field:
        assert [error["field"].startswith(field) for error in problem["errors"]] == [True], problem
    changes = changed_lines(before, quiet.page())
    counted = changes.pop(f'gpumem_reports_total{{outcome="{outcome}"}}')
    assert counted[1] - counted[0] == 1
    if outcome == "dropped":
        dropped = changes.pop("gpumem_processes_dropped_total")
        assert dropped[1] - dropped[0] == 1
    changes.pop(f'gpumem_reports_created{{outcome="{outcome}"}}', None)  # comes with the first of its kind
    assert changes == {}
    assert quiet.state() == state
