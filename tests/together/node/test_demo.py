from __future__ import annotations

import re
import socket
import threading
from pathlib import Path

from gpumem_exporter.demo import DemoNode
from tests.conftest import StartExporter
from tests.support.ports import free_port
from tests.support.servers.exporter_process import token_file
from tests.support.waiting import patient, wait_for


def test_its_reports_have_the_token_that_the_exporter_requires_and_it_stops_without_a_warning(
    start_exporter: StartExporter, tmp_path: Path
) -> None:
    token = token_file(tmp_path, "a-secret-that-is-long-enough-to-be-one")
    guarded = start_exporter(None, "--demo", "--report.token-file", token)
    wait_for(lambda: len(guarded.processes()) >= 12, "the processes that always report")
    metrics = guarded.metrics()
    accepted = metrics.value("gpumem_reports_total", outcome="accepted")
    assert accepted == sum(metrics.values("gpumem_reports_total"))
    assert guarded.stop() == 0
    # Some of its workloads run out of memory, and the exporter warns of that.
    log = "\n".join(line for line in guarded.log().splitlines() if " workload=demo-" not in line)
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
