"""What a real vLLM leaves behind when its API server is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from gpumem_client.wire.procfs import parse_stat
from tests.conftest import StartExporter
from tests.emulation.node import EmulatedNode
from tests.engines.conftest import StartVllm
from tests.engines.servers import TITLE
from tests.support.adopter import idle_soon
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_for, wait_until_equal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter, tmp_path: Path) -> ExporterProcess:
    flags = (*QUICK, "--action.allow", "default,terminate")
    return start_exporter(node, *flags, environment=idle_soon(tmp_path), fresh=True)


def test_the_core_of_a_killed_server_is_an_orphan_until_it_is_terminated(
    exporter: ExporterProcess, start_vllm: StartVllm
) -> None:
    start_vllm().wait()
    (core,) = exporter.get("/api/v1/processes")["processes"]
    assert (core["command"], core["orphan"]) == (TITLE, None)
    server = parse_stat(Path(f"/proc/{core['pid']}/stat").read_text()).parent_pid
    os.kill(server, signal.SIGKILL)

    def orphan() -> int | None:
        (found,) = exporter.get("/api/v1/processes")["processes"]
        return found["orphan"] and found["orphan"]["launcher_pid"]

    wait_until_equal(orphan, server, "the orphan")
    assert exporter.metrics().value("gpumem_process_orphan", pid=str(core["pid"]), reason="launcher_ended") == 1
    (result,) = exporter.act("terminate", target={"orphans": True}, wait_seconds=30)["results"]
    assert (result["pid"], result["outcome"]) == (core["pid"], "done")
    wait_for(lambda: not Path(f"/proc/{core['pid']}").exists(), "the end")
