"""At level debug, the logs of exporter and job show the way of a report and of a command."""

from __future__ import annotations

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.support.exporter_process import QUICK
from tests.support.waiting import eventually

LISTEN = """
import logging
class Kept(logging.Handler):
    def emit(self, record):
        lines.append(record.getMessage())
lines = []
logger = logging.getLogger("gpumem_client")
logger.addHandler(Kept())
logger.setLevel(logging.DEBUG)
"""


def test_debug_logs_name_the_connection_refused_reports_and_commands(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK, "--log.level", "debug")
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.exec(LISTEN)
    process.call("start_client", workload="watched")
    process.call("alloc", nbytes=MIB, device=0)
    exporter.wait_for_processes(process.pid)
    action = exporter.act("empty_cache", target={"pid": process.pid})["id"]
    assert exporter.request("POST", "/api/v1/reports", {}).status == 422

    def debug_lines(*parts: str) -> list[str]:
        return [line for line in exporter.log().splitlines() if all(part in line for part in ("level=debug", *parts))]

    assert len(debug_lines(f"pid={process.pid} ", "workload=watched")) == 1
    assert len(debug_lines(f"command {action} ")) > 1, "each state of the command"
    assert len(debug_lines("status=422")) == 1
    eventually(
        lambda: [line for line in process.exec("result = lines") if action in line],
        lambda found: len(found) > 1,
        what="the command and its result",
    )
    received, done = (line for line in process.exec("result = lines") if action in line)
    assert "received: empty_cache" in received
    assert "done" in done
    assert len([line for line in process.exec("result = lines") if exporter.url in line]) == 1
