from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from gpumem_exporter.demo import DemoNode
from tests.support.exporter_process import ExporterProcess, token_file
from tests.support.ports import free_port
from tests.support.waiting import eventually, patient

REPORTING = 12
"""The number of processes that always report; the nightly evaluation is between two runs at times."""


@contextmanager
def demo(folder: Path, *flags: str) -> Iterator[ExporterProcess]:
    """Run a demo until the end of the block; starts the block when all processes report."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GPUMEM_")}
    process = ExporterProcess(folder, "--demo", *flags, environment=environment)
    try:
        eventually(lambda: reporting(process), lambda known: len(known) >= REPORTING)
        yield process
    finally:
        process.close()


def reporting(exporter: ExporterProcess) -> list[Mapping[str, Any]]:
    return [process for process in exporter.get("/api/v1/processes")["processes"] if process["reporting"]]


def test_soon_after_the_start_every_process_reports_and_has_a_history(tmp_path: Path) -> None:
    with demo(tmp_path) as fresh:
        metrics = fresh.metrics()
        events = fresh.get("/api/v1/events?type=process_started&limit=100")["events"]
        live = eventually(lambda: fresh.get("/api/v1/live"), lambda live: live["findings"] and live["devices"])
        now = live["time"]["unix_seconds"]
        past = fresh.get(f"/api/v1/history?from={now - 3600}&to={now}")
        health = eventually(lambda: fresh.get("/health"), lambda health: health["status"] == "ok")
    assert health["devices"] == 8
    started = metrics.value("process_start_time_seconds")
    reported = sorted(event["detail"]["first_report_unix_seconds"] - started for event in events)
    assert reported[REPORTING - 1] < patient(5)
    starts = [event["unix_seconds"] for event in events[:REPORTING]]
    assert starts == sorted(starts)
    assert starts[-1] < started
    assert len(metrics.values("gpumem_device_memory_used_bytes")) == 8
    assert live["findings"][0]["kind"] == "growth"
    assert not [found for found in live["findings"] if found["severity"] == "critical"]
    assert {"idle_cache"} <= {found["kind"] for found in live["findings"]}
    assert [series["used"]["max"].count(None) for series in past["series"]] == [0] * 8


def test_its_reports_have_the_token_that_the_exporter_requires_and_it_stops_without_a_warning(tmp_path: Path) -> None:
    token = token_file(tmp_path, "a-secret-that-is-long-enough-to-be-one")
    with demo(tmp_path, "--report.token-file", token) as guarded:
        metrics = guarded.metrics()
        accepted = metrics.value("gpumem_reports_total", outcome="accepted")
        assert accepted == sum(metrics.values("gpumem_reports_total"))
        assert guarded.stop() == 0
        log = guarded.log()
    # Some of its workloads run out of memory, and the exporter warns of that.
    log = "\n".join(line for line in log.splitlines() if " workload=demo-" not in line)
    assert re.search(r"Traceback|level=(warning|error)", log) is None, log


def test_a_node_stops_in_time_whether_its_exporter_hangs_or_is_absent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hanging = f"http://127.0.0.1:{silent.getsockname()[1]}"
        absent = f"http://127.0.0.1:{free_port()}"
        for url in (hanging, absent):
            node = DemoNode()
            node.start(url)
            node.stop(patient(30))
            assert not [thread for thread in threading.enumerate() if thread.name.startswith("gpumem-demo")]
