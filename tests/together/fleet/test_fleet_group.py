"""A group on two nodes: a training process with its exporter on each, and a real Prometheus."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from gpumem_exporter.cli.fleet.prometheus import Prometheus
from tests.emulation.fixtures import MakeNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import ExporterProcess
from tests.support.ports import free_port
from tests.support.running_command import run_command
from tests.support.running_prometheus import RunningPrometheus
from tests.support.waiting import patient, wait_for

RANKS = 'max_over_time(gpumem_torch_allocated_bytes{workload="fleet-ranks"}[5m])'
ONE_RANK = 'last_over_time(gpumem_torch_allocated_bytes{workload="fleet-ranks", rank="0"}[5m])'  # a scrape may fail
TRAINING = """
import os, time
import gpumem_client as client
client.start(workload="fleet-ranks", rank=rank)
kept = torch.empty(1 << 20, dtype=torch.uint8, device="cuda")
while not os.path.exists(finished):
    torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    time.sleep(0.02)
    client.step()
"""


@pytest.fixture
def exporters(make_node: MakeNode, tmp_path: Path) -> Iterator[list[ExporterProcess]]:
    """The exporters of two training processes, which make steps."""
    with ExitStack() as ends:
        started = []
        for rank in range(2):
            node, folder = make_node(devices=1), tmp_path / f"exporter{rank}"
            folder.mkdir()
            flags = ("--web.listen-address", f"127.0.0.1:{free_port()}", "--report.interval", "0.5")
            started.append(ExporterProcess(folder, *flags, environment=node.environment()))
            ends.callback(started[-1].close)
            process = TorchProcess(node, {"GPUMEM_EXPORTER_URL": started[-1].url})
            ends.callback(process.close)
            process.send("exec", code=TRAINING, rank=rank, finished=str(tmp_path / "finished"))
        ends.callback((tmp_path / "finished").touch)
        yield started


def steps(exporters: list[ExporterProcess]) -> list[int]:
    """Return the last reported step of each rank that reports its speed."""
    found = [process for exporter in exporters for process in exporter.processes().values()]
    return [process["step"] for process in found if process["step_seconds"]]


def test_all_ranks_clear_after_the_same_step_if_the_query_selects_one(
    exporters: list[ExporterProcess], tmp_path: Path
) -> None:
    addresses = [exporter.tcp_url.removeprefix("http://") for exporter in exporters]
    with RunningPrometheus(tmp_path / "prometheus", {address: address for address in addresses}) as prometheus:
        wait_for(lambda: len(Prometheus(prometheus.url).query(RANKS).series) == 2, "two ranks in Prometheus")
        words = ("clear", "--group", "--query", ONE_RANK, "--prometheus", prometheus.url)
        for _ in range(5):  # the ranks of a busy machine may be too slow for a group
            wait_for(lambda: len(steps(exporters)) == 2, "two ranks that make steps")
            ended = run_command("fleet", *words, "--deadline", str(patient(60)), "--json")
            if ended.stdout:
                break
    assert ended.returncode == 0, ended
    document = json.loads(ended.stdout)
    assert document["state"] == "done"
    assert {(row["rank"], row["outcome"], row["step"]) for row in document["results"]} == {
        ("0", "done", document["at_step"]),
        ("1", "done", document["at_step"]),
    }
    assert all(row["thread_id"] == row["pid"] for row in document["results"]), "in the training thread"
    assert len({row["url"] for row in document["results"]}) == 2
