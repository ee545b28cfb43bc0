"""A group on several nodes: real ranks with a collective in each step, two exporters and a real Prometheus."""

from __future__ import annotations

import json
import operator
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.cli.fleet.prometheus import Prometheus
from tests.emulation.node import EmulatedNode
from tests.support.exporter_process import ExporterProcess
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.running_command import run_command
from tests.support.running_prometheus import RunningPrometheus
from tests.support.waiting import patient, wait_for

WORKLOAD = "fleet-ranks"
ONE_RANK = f'last_over_time(gpumem_torch_allocated_bytes{{workload="{WORKLOAD}", rank="0"}}[5m])'  # a scrape may fail
RANK = """
import os, sys, time
import torch, torch.distributed as dist
import gpumem_client as client
dist.init_process_group("gloo")
rank = dist.get_rank()
os.environ["GPUMEM_EXPORTER_URL"] = sys.argv[2 + rank]  # as on a node of its own
client.start(workload="fleet-ranks")
kept = torch.empty(1 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
stop = torch.zeros(1)
while not stop.item():
    spare = torch.empty(3 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
    del spare
    stop.fill_(os.path.exists(sys.argv[1]))
    dist.all_reduce(stop, op=dist.ReduceOp.MAX)
    time.sleep(0.02)
    client.step()
client.stop()
os._exit(0)
"""


@dataclass(frozen=True)
class Ranks:
    """Two ranks, the exporter of each, and a Prometheus."""

    exporters: tuple[ExporterProcess, ...]
    pids: tuple[int, ...]
    prometheus: str

    def clear(self) -> Any:
        """Run `fleet clear --group`, and return its document.

        The command runs again if the ranks of a busy machine were too slow for a group.
        """
        for _ in range(5):
            ended = run_command(
                *("fleet", "clear", "--group", "--query", ONE_RANK, "--prometheus", self.prometheus),
                *("--deadline", str(patient(60)), "--json"),
            )
            if ended.stdout:
                break
            self.wait_for_steps()
        assert ended.returncode == 0, ended
        return json.loads(ended.stdout)

    def wait_for_steps(self) -> None:
        """Wait until each rank reports another step."""
        before = self.steps()
        wait_for(lambda: all(map(operator.gt, self.steps(), before)), "a step of each rank")

    def steps(self) -> list[int]:
        """Return the last reported step of each rank."""
        pairs = zip(self.exporters, self.pids, strict=True)
        return [int(exporter.processes()[pid]["step"] or 0) for exporter, pid in pairs]


@pytest.fixture(scope="module")
def ranks(emulation: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    folder = tmp_path_factory.mktemp("fleet-group")
    (folder / "rank.py").write_text(RANK)
    node = EmulatedNode(folder / "node")
    instances = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    ends: list[Callable[[], object]] = [node.close]
    try:
        exporters = []
        for number, instance in enumerate(instances):
            (folder / f"exporter{number}").mkdir()
            flags = ("--web.listen-address", instance, "--report.interval", "0.5")
            exporters.append(ExporterProcess(folder / f"exporter{number}", *flags, environment=node.environment()))
            ends.append(exporters[-1].close)
        prometheus = RunningPrometheus(folder / "prometheus", {instance: instance for instance in instances})
        ends.append(prometheus.close)
        environment = {
            **node.environment(),
            "PYTHONPATH": str(REPOSITORY),
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        with (folder / "torchrun.log").open("wb") as log:
            launcher = subprocess.Popen(
                [
                    *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"),
                    *(str(folder / "rank.py"), str(folder / "finished"), *(exporter.url for exporter in exporters)),
                ],
                env=environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        ends.append(lambda: _end(launcher, folder, exporters))

        def steps() -> tuple[int, ...]:
            assert launcher.poll() is None, (folder / "torchrun.log").read_text()
            found = [next(iter(exporter.processes().values()), None) for exporter in exporters]
            return tuple(one["pid"] for one in found if one and one["step"] and one["step_seconds"])

        pids = wait_for(lambda: steps() if len(steps()) == 2 else None, "two ranks that make steps", 120.0)
        assert pids is not None
        running = Ranks(tuple(exporters), pids, prometheus.url)
        known = f'max_over_time(gpumem_torch_allocated_bytes{{workload="{WORKLOAD}"}}[5m])'
        wait_for(lambda: len(Prometheus(prometheus.url).query(known).series) == 2, "two ranks in Prometheus")
        yield running
    finally:
        for end in reversed(ends):
            end()


def _end(launcher: subprocess.Popen[bytes], folder: Path, exporters: list[ExporterProcess]) -> None:
    (folder / "finished").touch()
    try:
        launcher.wait(patient(30))
    except subprocess.TimeoutExpired:
        for exporter in exporters:  # torchrun starts each rank in its own session
            for pid in exporter.processes():
                os.kill(pid, signal.SIGKILL)
        launcher.kill()
        launcher.wait(patient(30))


def test_all_ranks_clear_after_the_same_step_if_the_query_selects_one(ranks: Ranks) -> None:
    document = ranks.clear()
    assert document["state"] == "done"
    assert {(row["rank"], row["outcome"], row["step"]) for row in document["results"]} == {
        ("0", "done", document["at_step"]),
        ("1", "done", document["at_step"]),
    }
    assert {row["pid"] for row in document["results"]} == set(ranks.pids)
    assert {row["thread_id"] for row in document["results"]} == set(ranks.pids)  # in the training thread
    assert len({row["url"] for row in document["results"]}) == 2
