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
from tests.support.ports import free_port
from tests.support.servers.exporter_process import ExporterProcess, token_file
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
