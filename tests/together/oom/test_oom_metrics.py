"""Series of out-of-memory errors: the values of the event, also after the end of the process or the exporter."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

from gpumem_exporter.core.event import EVENT_TYPES
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_for

VALUES = ("requested", "device_free", "limit", "allocated", "reserved", "reclaimable", "fragmented")
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}
RUN_OUT = "torch.empty(1 << 40, dtype=torch.uint8, device='cuda:1')"
CAUGHT = f"try:\n    {RUN_OUT}\nexcept torch.OutOfMemoryError: pass"


def ooms(exporter: ExporterProcess) -> list[dict[str, Any]]:
    """Return the events with all numbers as text."""
    answer = exporter.request("GET", "/api/v1/events?type=oom&limit=1000")
    assert answer.status == 200, answer
    found: list[dict[str, Any]] = json.loads(answer.body, parse_int=str, parse_float=str)["events"]
    return found


def series_of(event: dict[str, Any]) -> list[str]:
    """Return the expected lines of an event."""
    names = ("gpu", "uuid", "pid", "workload", "rank")
    labels = ",".join(f'{name}="{event[name]}"' for name in names)
    detail = event["detail"]
    known = {"timestamp_seconds": event["unix_seconds"]}
    for name in VALUES:
        values = detail if name in ("requested", "device_free", "limit") else detail["allocator"]
        known[f"{name}_bytes"] = values[f"{name}_bytes"]
    return [f"gpumem_last_oom_{name}{{{labels}}} {value}" for name, value in known.items() if value is not None]


def shown(exporter: ExporterProcess, **headers: str) -> list[str]:
    answer = exporter.request("GET", "/metrics", headers=headers)
    return [line for line in answer.body.decode().splitlines() if line.startswith("gpumem_last_oom_")]


def counted(exporter: ExporterProcess) -> dict[str, float]:
    metrics = exporter.metrics()
    return {type_: metrics.value("gpumem_events_total", type=type_) for type_ in EVENT_TYPES}


def test_a_caught_error_shows_the_values_of_its_event_in_both_formats(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    assert counted(exporter) == dict.fromkeys(EVENT_TYPES, 0)
    assert shown(exporter) == []
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="greedy", rank=2)
    process.call("random_heap", device=1, seed=5)
    exporter.wait_for_processes(process.pid)
    for number in (1, 2):
        process.exec(CAUGHT)
        wait_for(lambda number=number: len(ooms(exporter)) == number, "the error")  # type: ignore[misc]
        event = ooms(exporter)[-1]
        assert (event["pid"], event["workload"], event["detail"]["number"]) == (str(process.pid), "greedy", str(number))
        lines = series_of(event)
        assert len(lines) == 1 + len(VALUES)
        assert shown(exporter) == shown(exporter, **OPENMETRICS) == lines
    stats, book = process.call("stats", device=1), node.books()[1]
    metrics = exporter.metrics()
    assert metrics.value("gpumem_last_oom_requested_bytes", gpu="1", uuid=book.uuid) == 1 << 40
    assert metrics.value("gpumem_last_oom_limit_bytes") == book.total_bytes - book.reserved_bytes
    assert metrics.value("gpumem_last_oom_device_free_bytes") == book.free_bytes
    assert metrics.value("gpumem_last_oom_allocated_bytes") == stats["allocated_bytes.all.current"]
    assert metrics.value("gpumem_last_oom_reserved_bytes") == stats["reserved_bytes.all.current"]
    assert counted(exporter) == {**dict.fromkeys(EVENT_TYPES, 0), "oom": 2, "process_started": 1}


def test_an_error_stays_after_the_end_of_its_process_and_after_a_restart_with_storage(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--storage.path", str(tmp_path / "events"))
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="doomed")
    process.call("alloc", nbytes=1 << 28, device=1)
    wait_for(lambda: exporter.metrics().values("gpumem_torch_allocated_bytes") == [1 << 28], "its reports")
    assert process.end_with(RUN_OUT) == 1
    assert "OutOfMemoryError" in process.stderr()
    wait_for(lambda: not exporter.metrics().values("gpumem_reporter_up"), "its end")
    metrics = exporter.metrics()
    assert not [name for name in metrics.samples if name.startswith("gpumem_torch_")]
    (event,) = ooms(exporter)
    lines = series_of(event)
    assert shown(exporter) == lines
    assert metrics.value("gpumem_last_oom_requested_bytes", pid=str(process.pid), workload="doomed") == 1 << 40
    assert metrics.value("gpumem_last_oom_allocated_bytes") == 1 << 28
    assert exporter.stop(signal.SIGKILL) == -signal.SIGKILL
    exporter.start()
    wait_for(lambda: shown(exporter), "the earlier error")
    assert shown(exporter) == lines
    assert counted(exporter)["oom"] == 0
    wait_for(lambda: severities(exporter) == {"doomed": "critical"}, "the end of its process")


def test_an_error_whose_process_ends_while_no_exporter_runs_is_critical_and_another_one_is_not(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--report.expiry", "2", "--storage.path", str(tmp_path / "events"))
    caught = {}
    for name in ("doomed", "other"):
        process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
        process.call("start_client", workload=name)
        process.call("alloc", nbytes=1 << 28, device=1)
        exporter.wait_for_processes(process.pid)
        process.exec(CAUGHT)
        caught[name] = process
    wait_for(lambda: severities(exporter) == dict.fromkeys(caught, "warning"), "both errors")
    assert exporter.stop(signal.SIGKILL) == -signal.SIGKILL
    caught["doomed"].kill()
    exporter.start()
    wait_for(lambda: severities(exporter) == {"doomed": "critical", "other": "warning"}, "the end of one process")


def severities(exporter: ExporterProcess) -> dict[str, str]:
    """Return the severity of the finding of each workload with an error."""
    findings = exporter.get("/api/v1/live")["findings"]
    return {each["sentence"].split()[0]: each["severity"] for each in findings if each["kind"] == "oom"}
