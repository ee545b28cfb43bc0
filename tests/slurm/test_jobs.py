"""Batch jobs of a real Slurm with the TaskProlog and the Epilog of deploy/slurm."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.node import GIB, EmulatedNode
from tests.slurm.cluster import Cluster, missing_programs
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_for, wait_until_equal

pytestmark = [
    pytest.mark.tools,
    pytest.mark.skipif(
        bool(missing_programs()), reason=f"Slurm is not installed, Debian's packages have it: {missing_programs()}"
    ),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start slurmd in a namespace"),
]

CLIENT = "/run/gpumem/client"
PYTHON = str(Path(sys.base_prefix) / "bin" / "python3")
"""An interpreter without this project. Jobs find torch through PYTHONPATH, which runs no .pth file."""
PACKAGES = sysconfig.get_path("purelib")

TRAIN = """
import json, os, sys, time
import torch

rank = int(os.environ["SLURM_PROCID"])
held = torch.empty(256 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
freed = torch.empty(512 << 20, dtype=torch.uint8, device=f"cuda:{rank}")
del freed
facts = {
    "pid": os.getpid(),
    "rank": rank,
    "client": sys.modules["gpumem_client"].__file__ if "gpumem_client" in sys.modules else None,
}
with open(f"facts{rank}.part", "w") as file:
    json.dump(facts, file)
os.rename(f"facts{rank}.part", f"facts{rank}")
while not os.path.exists("end"):
    time.sleep(0.1)
"""
ENVIRONMENT = "#!/bin/bash\nsrun cat /proc/self/environ >environment\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path_factory.mktemp("slurm"), sys.executable)
    yield cluster
    cluster.close()


@pytest.fixture(autouse=True)
def idle_node(cluster: Cluster) -> Iterator[None]:
    """No job may leave a node that takes no other jobs."""
    yield
    assert cluster.node_state() == "idle", cluster.logs()


@pytest.fixture
def exporter(cluster: Cluster, node: EmulatedNode) -> Iterator[ExporterProcess]:
    exporter = ExporterProcess(
        cluster.run, *QUICK, *("--client.directory", CLIENT), environment=node.environment(), launcher=cluster.launcher
    )
    yield exporter
    print(exporter.log())
    exporter.close()
    exporter.socket.unlink(missing_ok=True)


def submitted(cluster: Cluster, folder: Path, script: str, *options: str, environment: dict[str, str]) -> str:
    (folder / "job.sh").write_text(script)
    return cluster.submit(folder / "job.sh", f"--chdir={folder}", "--output=output", *options, environment=environment)


def reporting(exporter: ExporterProcess, job: str) -> set[tuple[str, str, str]]:
    """Return pid, rank and workload of the processes of a job."""
    found = exporter.metrics().samples.get("gpumem_process_info", {})
    return {
        (labels["pid"], labels["rank"], labels["workload"])
        for labels in map(dict, found)
        if labels["slurm_job_id"] == job and labels["reporting"] == "true"
    }


def peaks(exporter: ExporterProcess, job: str) -> dict[int, int | None]:
    """Return the driver's peak of each process of a job."""
    processes = exporter.get(f"/api/v1/jobs/{job}")["processes"]
    return {process["pid"]: process["devices"][0]["used_peak_bytes"] for process in processes}


def test_an_unchanged_batch_script_reports_and_its_memory_is_on_file_afterwards(
    cluster: Cluster, node: EmulatedNode, exporter: ExporterProcess, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    environment = node.environment({"PATH": os.environ["PATH"], "PYTHONPATH": PACKAGES})
    options = ("--job-name=llm-pretrain", "--ntasks=2")
    job = submitted(cluster, tmp_path, f"#!/bin/bash\nsrun {PYTHON} train.py\n", *options, environment=environment)

    def facts() -> list[dict[str, Any]]:
        assert not (tmp_path / "output").exists() or "Error" not in (tmp_path / "output").read_text()
        return [json.loads(path.read_text()) for path in sorted(tmp_path.glob("facts[01]"))]

    wait_for(lambda: len(facts()) == 2, "two tasks with memory", 120)
    tasks = facts()
    expected = {(str(task["pid"]), str(task["rank"]), "llm-pretrain") for task in tasks}
    wait_until_equal(lambda: reporting(exporter, job), expected, "reporting processes of the job")
    used = {task["pid"]: node.books().used_by(task["pid"]) for task in tasks}
    wait_until_equal(lambda: peaks(exporter, job), used, "the driver's values of the job")
    assert all(task["client"].startswith("/run/gpumem/") for task in tasks), tasks

    (tmp_path / "end").touch()
    assert cluster.wait_for_end(job) == "COMPLETED", (tmp_path / "output").read_text()

    assert peaks(exporter, job) == used
    assert min(used.values()) > GIB

    shown = cluster.command("/opt/gpumem-exporter/bin/gpumem-exporter", "report", "--job", job)
    assert shown.returncode == 0, shown.stderr
    file = cluster.root / f"var/log/gpumem/{job}.node0.txt"
    assert file.read_text() == shown.stdout

    # The job of another user, who may read the file.
    variables = (f"SLURM_JOB_ID={job}", "SLURM_JOB_UID=65534", "SLURMD_NODENAME=node1")
    assert cluster.command("env", "-i", *variables, "/etc/slurm/epilog.d/gpumem-epilog").returncode == 0
    status = file.with_name(f"{job}.node1.txt").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (65534, 0o640)


@pytest.mark.parametrize("ends", ["sleep infinity", "exit 3", None])
def test_a_job_runs_and_its_node_stays_in_use_with_a_command_that(
    cluster: Cluster, tmp_path: Path, ends: str | None
) -> None:
    command = cluster.root / "opt/gpumem-exporter/bin/gpumem-exporter"
    before = command.read_text()
    command.write_text(f"#!/bin/sh\necho half\n{ends}\n")
    command.chmod(0o755 if ends else 0o644)
    try:
        job = submitted(cluster, tmp_path, ENVIRONMENT, environment={"PATH": os.environ["PATH"]})
        assert cluster.wait_for_end(job) == "COMPLETED"
        assert cluster.node_state() == "idle"
    finally:
        command.write_text(before)
        command.chmod(0o755)
    assert not (cluster.root / f"var/log/gpumem/{job}.node0.txt").exists()


@pytest.mark.parametrize(
    ("given", "name", "expected"),
    [
        ({}, "train", {"PYTHONPATH": CLIENT, "GPUMEM_DEFAULT_WORKLOAD": "train"}),
        (
            {"PYTHONPATH": "/a:/b"},
            r"a b\n$(id)",
            {"PYTHONPATH": f"{CLIENT}:/a:/b", "GPUMEM_DEFAULT_WORKLOAD": r"a b\n$(id)"},
        ),
        ({"PYTHONPATH": f"/a:{CLIENT}:/b"}, "t", {"PYTHONPATH": f"/a:{CLIENT}:/b", "GPUMEM_DEFAULT_WORKLOAD": "t"}),
        (
            {"GPUMEM_WORKLOAD": "mine"},
            "t",
            {"PYTHONPATH": CLIENT, "GPUMEM_WORKLOAD": "mine", "GPUMEM_DEFAULT_WORKLOAD": "t"},
        ),
        # A job that another job has submitted inherits its environment.
        ({"GPUMEM_DEFAULT_WORKLOAD": "first"}, "second", {"PYTHONPATH": CLIENT, "GPUMEM_DEFAULT_WORKLOAD": "second"}),
        # Slurm would cut the value.
        ({"PYTHONPATH": "/" + "x" * 5000}, "t", {"PYTHONPATH": "/" + "x" * 5000}),
    ],
    ids=["no path", "path", "client in path", "workload", "submitted by a job", "long path"],
)
def test_tasks_get_the_variables_of_the_client(
    cluster: Cluster,
    exporter: ExporterProcess,
    tmp_path: Path,
    given: dict[str, str],
    name: str,
    expected: dict[str, str],
) -> None:
    environment = {"PATH": os.environ["PATH"], **given}
    job = submitted(cluster, tmp_path, ENVIRONMENT, f"--job-name={name}", environment=environment)
    assert cluster.wait_for_end(job) == "COMPLETED"
    lines = (tmp_path / "environment").read_text().split("\0")
    found = dict(line.split("=", 1) for line in lines if line.startswith(("PYTHONPATH=", "GPUMEM_")))
    assert found == expected
