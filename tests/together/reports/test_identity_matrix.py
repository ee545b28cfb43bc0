"""Reporters are matched with the driver's processes across real PID namespaces, and never with a wrong one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.procfs import pid_namespace
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.kubelet import Kubelet
from tests.support.namespaces import CONTAINER, children, needs_namespaces
from tests.support.waiting import wait_for

pytestmark = needs_namespaces


def host_pid_of(process: TorchProcess) -> int:
    """Return the host's pid of the only process below the launcher."""
    assert process.pid == 1, "it is the first process of its namespace"
    (pid,) = children(process._popen.pid)
    return pid


def start_in_container(start_torch: StartTorch, url: str, workload: str, nbytes: int) -> TorchProcess:
    process = start_torch(launcher=CONTAINER, GPUMEM_EXPORTER_URL=url)
    process.call("start_client", workload=workload)
    process.call("alloc", nbytes=nbytes)
    return process


def reporters(exporter: ExporterProcess) -> dict[str, Any]:
    """The reporting processes by workload."""
    return {entry["workload"]: entry for entry in exporter.get("/api/v1/processes")["processes"] if entry["reporting"]}


@pytest.mark.parametrize("way", ["SO_PEERCRED", "NSpid"])
def test_reporters_in_containers_have_their_host_pids_and_bytes(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, way: str
) -> None:
    exporter = start_exporter(node, *QUICK)
    url = exporter.url if way == "SO_PEERCRED" else exporter.tcp_url
    inside = {
        name: start_in_container(start_torch, url, name, size * MIB) for name, size in (("first", 30), ("second", 70))
    }
    outside = start_torch(GPUMEM_EXPORTER_URL=url)
    outside.call("start_client", workload="outside")
    outside.call("alloc", nbytes=50 * MIB)
    pids = {name: host_pid_of(process) for name, process in inside.items()} | {"outside": outside.pid}
    used = {pid: node.books()[0].processes[pid] for pid in pids.values()}
    wait_for(lambda: set(reporters(exporter)) == set(pids), "all three")
    wait_for(lambda: len(exporter.metrics().values("gpumem_torch_non_torch_bytes")) == 3, "a poll of all three")
    assert exporter.metrics().ledgers()[node.uuid(0)]["other_processes"] == 0

    found = reporters(exporter)
    assert {name: (entry["pid"], entry["host_pid"]) for name, entry in found.items()} == {
        name: (pid, pid) for name, pid in pids.items()
    }
    assert {name: entry["own_pid"] for name, entry in found.items()} == {
        "first": 1,
        "second": 1,
        "outside": outside.pid,
    }
    for name, process in {**inside, "outside": outside}.items():
        assert found[name]["pid_namespace"] == pid_namespace(f"/proc/{pids[name]}")
        metrics, stats = exporter.metrics(), process.call("stats")
        labels = {"gpu": "0", "pid": str(pids[name]), "workload": name}
        assert metrics.value("gpumem_torch_allocated_bytes", **labels) == stats["allocated_bytes.all.current"]
        reserved = stats["reserved_bytes.all.current"]
        assert metrics.value("gpumem_torch_non_torch_bytes", **labels) == used[pids[name]] - reserved
    exporter.metrics().assert_ledgers_add_up()

    inside["second"].call("free")
    action = exporter.act("empty_cache", target={"pid": pids["second"]})
    assert [(row["pid"], row["outcome"], row["freed_bytes"]) for row in action["results"]] == [
        (pids["second"], "done", 70 * MIB)
    ]
    assert inside["first"].call("stats")["reserved_bytes.all.current"] > 0

    inside["first"].kill()
    wait_for(lambda: set(reporters(exporter)) == {"second", "outside"}, "the first to be forgotten")
    wait_for(lambda: f'pid="{pids["first"]}"' not in exporter.metrics().text, "its series to go")
    exporter.metrics().assert_ledgers_add_up()


UID = "0a1b2c3d_1111_2222_3333_444455556666"
CONTAINER_ID = "3f2a9c0d" * 8


@pytest.fixture
def pods_cgroup() -> Iterator[Path]:
    """Create a cgroup with the name that a kubelet with the systemd driver and containerd uses."""
    roots = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/systemd"))
    below = (
        f"kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{UID}.slice/cri-containerd-{CONTAINER_ID}.scope"
    )
    for root in roots:
        if not (root / "cgroup.procs").exists():
            continue
        try:
            (root / below).mkdir(parents=True)
        except OSError:
            continue
        yield root / below
        path = root / below
        while path != root:
            wait_for(lambda path=path: _removed(path), f"{path} to be empty")  # type: ignore[misc]
            path = path.parent
        return
    pytest.skip("cgroups cannot be created here")


def _removed(path: Path) -> bool:
    try:
        path.rmdir()
    except OSError:
        return False
    return True


def test_a_process_in_a_pod_has_the_names_of_pod_and_jobs(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, pods_cgroup: Path, tmp_path: Path
) -> None:
    socket = tmp_path / "kubelet.sock"
    with Kubelet(socket) as kubelet:
        kubelet.containers = {("web", "chat-0", "server"): (node.uuid(0),)}
        kubelet.claims = {("ml", "llm-0", "trainer"): (("gpu.nvidia.com", "gpu-1"),)}
        exporter = start_exporter(node, *QUICK, environment={"GPUMEM_POD_RESOURCES_SOCKET": str(socket)})
        process = start_torch(
            launcher=("sh", "-c", f'echo $$ > "{pods_cgroup}/cgroup.procs"; exec "$@"', "sh"),
            GPUMEM_EXPORTER_URL=exporter.url,
            SLURM_JOB_ID="4242",
            RAY_JOB_ID="01000000",
        )
        process.call("start_client")
        process.call("alloc", nbytes=MIB, device=1)
        silent = start_torch(SLURM_JOB_ID="77")
        silent.call("alloc", nbytes=MIB, device=0)

        pid = str(process.pid)
        wait_for(lambda: exporter.metrics().infos().get(pid, {}).get("k8s_pod") == "llm-0", "the pod's name")
        wait_for(lambda: str(silent.pid) in exporter.metrics().infos(), "the process without a reporter")
        infos = exporter.metrics().infos()
        expected = {
            "container_id": CONTAINER_ID,
            "k8s_pod_uid": UID.replace("_", "-"),
            "k8s_namespace": "ml",
            "k8s_pod": "llm-0",
            "k8s_container": "trainer",
            "slurm_job_id": "4242",
            "ray_job_id": "01000000",
            "reporting": "true",
        }
        assert expected.items() <= infos[pid].items()
        other = infos[str(silent.pid)]
        assert (other["slurm_job_id"], other["k8s_pod"], other["reporting"]) == ("77", "", "false")
        process.close()
