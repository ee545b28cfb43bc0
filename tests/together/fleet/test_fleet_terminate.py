"""`fleet terminate`: real processes on two nodes, one of which does not allow it; a real Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.cli.fleet.prometheus import Prometheus
from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.ports import free_port
from tests.support.running_command import run_command
from tests.support.running_prometheus import RunningPrometheus
from tests.support.waiting import patient, wait_for, wait_until_equal

TOKEN = "a-token-for-tests"
DOOMED = 'last_over_time(gpumem_torch_allocated_bytes{workload="doomed"}[10m]) > 32e6'  # a scrape may fail
MIB = 1 << 20


class Nodes:
    """Two nodes with two processes each, `doomed` and `spared`, and a Prometheus that knows them."""

    def __init__(self, nodes: list[EmulatedNode], processes: list[dict[str, TorchProcess]], prometheus: str) -> None:
        self.nodes = nodes
        self.processes = processes
        self._prometheus = prometheus

    def terminate(self, *options: str, code: int) -> Any:
        """Terminate the workload `doomed` on every node."""
        ended = run_command(
            *("fleet", "terminate", "--prometheus", self._prometheus, "--query", DOOMED, "--json"),
            *("--deadline", str(patient(60)), *options),
            GPUMEM_ACTION_TOKEN=TOKEN,
        )
        assert (ended.returncode, ended.stderr) == (code, "")
        return json.loads(ended.stdout)

    def used(self, number: int, workload: str) -> int:
        """The bytes of a process by the driver."""
        return self.nodes[number].books().used_by(self.processes[number][workload].pid)


@pytest.fixture
def nodes(
    make_node: MakeNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> Iterator[Nodes]:
    (tmp_path / "token").touch(0o600)
    (tmp_path / "token").write_text(TOKEN)
    made, processes, instances = [], [], []
    for number, allowed in enumerate(("terminate,empty_cache", "empty_cache")):
        node = make_node()
        instance = f"127.0.0.1:{free_port()}"
        flags = ("--web.listen-address", instance, "--action.token-file", str(tmp_path / "token"))
        # No report expires on a slow machine.
        reports = ("--report.interval", "0.2", "--report.expiry", str(patient(120)))
        exporter = start_exporter(node, *flags, "--action.allow", allowed, *reports)
        here = {}
        for workload in ("doomed", "spared"):
            process = here[workload] = start_torch(node, GPUMEM_EXPORTER_URL=exporter.url)
            process.call("alloc", nbytes=64 * MIB)
            process.call("start_client", workload=workload, rank=str(number))
        exporter.wait_for_processes(*(process.pid for process in here.values()))
        made.append(node)
        processes.append(here)
        instances.append(instance)
    with RunningPrometheus(tmp_path / "prometheus", {instance: instance for instance in instances}) as prometheus:
        api = Prometheus(prometheus.url)
        wait_for(lambda: len(api.query(DOOMED).series) == 2, "the series of both in Prometheus")
        yield Nodes(made, processes, prometheus.url)


def test_selected_processes_are_terminated_only_where_that_is_allowed(nodes: Nodes) -> None:
    held = nodes.used(0, "doomed")
    for dry_run in (True, False):
        document = nodes.terminate(*(["--dry-run"] if dry_run else []), code=1)
        by_rank = {row["rank"]: row for row in document["results"]}
        assert (by_rank["0"]["outcome"], by_rank["0"]["freed_bytes"]) == (
            "would_terminate" if dry_run else "done",
            held,
        )
        assert by_rank["1"]["outcome"] == "refused"
        assert "--action.allow" in by_rank["1"]["reason"]
        if dry_run:
            assert nodes.used(0, "doomed") == held
        else:
            wait_until_equal(lambda: nodes.used(0, "doomed"), 0, "bytes of the ended process")
    assert nodes.processes[0]["doomed"].finish() != 0
    for number, workload in ((0, "spared"), (1, "doomed"), (1, "spared")):
        assert nodes.used(number, workload) > 64 * MIB
        assert nodes.processes[number][workload].call("stats", device=0)
