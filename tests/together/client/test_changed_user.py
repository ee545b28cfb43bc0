"""A job that changes its user, as a job that root starts does, reports as its new user."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.support.processes.other_user import OTHER_UID, needs_root
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import eventually, wait_for

pytestmark = needs_root


@pytest.fixture
def exporter(emulation: Path) -> Iterator[tuple[EmulatedNode, ExporterProcess]]:
    """An exporter whose socket every user can reach, unlike one in pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o755)
        with EmulatedNode(folder / "node") as node:
            exporter = ExporterProcess(folder, *QUICK, environment=node.environment())
            try:
                yield node, exporter
            finally:
                exporter.close()


@pytest.mark.parametrize(("way", "change"), [("unix", "os.setuid(uid)"), ("tcp", "os.seteuid(uid)")])
def test_reports_after_a_change_of_the_user_belong_to_the_new_user(
    exporter: tuple[EmulatedNode, ExporterProcess], start_torch: StartTorch, way: str, change: str
) -> None:
    node, server = exporter
    tcp = wait_for(lambda: re.search(r"http://127\.0\.0\.1:[1-9]\d*", server.log()), "its address").group()
    process = start_torch(node, GPUMEM_EXPORTER_URL=server.url if way == "unix" else tcp)
    process.call("start_client", workload="job")
    process.call("alloc", nbytes=3 * MIB, device=0)
    server.wait_for_processes(process.pid)

    def owners() -> list[int]:
        return [entry["uid"] for entry in server.get("/api/v1/processes")["processes"] if entry["reporting"]]

    assert owners() == [0]
    process.exec(f"import os; {change}", uid=OTHER_UID)
    changed = eventually(owners, lambda found: found not in ([0], []), what="the new owner")
    assert changed == [OTHER_UID], "its memory is never counted for both users"
    (allocated,) = server.metrics().values("gpumem_torch_allocated_bytes", pid=str(process.pid))
    assert allocated == 3 * MIB
