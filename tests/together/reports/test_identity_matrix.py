"""Reporters are matched with the driver's processes across real PID namespaces, or not at all as in a sidecar."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_client.wire.procfs import pid_namespace
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.processes.namespaces import CONTAINER, children, needs_namespaces
from tests.support.servers.exporter_process import QUICK, ExporterProcess, token_file
from tests.support.servers.kubelet import Kubelet
from tests.support.waiting import wait_for

pytestmark = needs_namespaces


def only_child(launcher_pid: int) -> int:
    """Return the host's pid of the only process below a launcher."""
    (pid,) = children(launcher_pid)
    return pid


def start_inside(
    start_torch: StartTorch, url: str, workload: str, nbytes: int, launcher: tuple[str, ...] = CONTAINER
) -> TorchProcess:
    process = start_torch(launcher=launcher, GPUMEM_EXPORTER_URL=url)
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
    inside = {name: start_inside(start_torch, url, name, size * MIB) for name, size in (("first", 30), ("second", 70))}
    outside = start_torch(GPUMEM_EXPORTER_URL=url)
    outside.call("start_client", workload="outside")
    outside.call("alloc", nbytes=50 * MIB)
    pids = {name: only_child(process._popen.pid) for name, process in inside.items()} | {"outside": outside.pid}
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


def shared_namespace(exporter: ExporterProcess) -> tuple[str, ...]:
    """Return a launcher that starts a program in the exporter's PID namespace, as shareProcessNamespace does."""
    assert exporter._popen is not None
    return ("nsenter", "--target", str(only_child(exporter._popen.pid)), "--pid", "--mount", f"--wd={REPOSITORY}", "--")


def wait_for_polls(exporter: ExporterProcess) -> None:
    """Wait until three further polls have ended."""

    def polls() -> int:
        return int(exporter.get("/health")["checks"]["poller"]["detail"].split()[0])

    before = polls()
    wait_for(lambda: polls() >= before + 3, "further polls")


def assert_others_are_unknown(exporter: ExporterProcess, node: EmulatedNode, reserved: int) -> dict[str, int]:
    """Check and return the ledger of the first device, whose reporters have reserved this much."""
    metrics = exporter.metrics()
    metrics.assert_ledgers_add_up()
    ledger = metrics.ledgers()[node.uuid(0)]
    assert not ledger.keys() & {"other_processes", "non_torch"}
    assert sum(ledger[f"torch_{part}"] for part in ("allocated", "reclaimable", "fragmented")) == reserved
    assert ledger["unattributed"] == node.books()[0].used_bytes - reserved
    assert metrics.values("gpumem_torch_non_torch_bytes") == []
    assert metrics.values("gpumem_process_memory_used_bytes") == []
    assert exporter.get("/health")["mode"] == "sidecar"
    return ledger


def test_a_sidecar_shows_its_reporters_and_leaves_the_rest_unattributed(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    token = token_file(tmp_path, "right")  # the exporter cannot see this caller
    node.set_process(31337, 0, GIB)  # of another pod
    exporter = start_exporter(node, *QUICK, "--action.token-file", token, launcher=CONTAINER)
    wait_for_polls(exporter)
    assert_others_are_unknown(exporter, node, 0)

    inside = start_inside(start_torch, exporter.tcp_url, "train", 40 * MIB, shared_namespace(exporter))
    node.show_pid_as(inside.pid, only_child(inside._popen.pid))
    beside = start_inside(start_torch, exporter.url, "train", 40 * MIB)
    reserved = 40 * MIB
    wait_for(lambda: exporter.metrics().values("gpumem_torch_reserved_bytes") == [reserved] * 2, "their reports")
    wait_for_polls(exporter)
    assert assert_others_are_unknown(exporter, node, 2 * reserved)["torch_allocated"] == 2 * reserved

    entries = {entry["host_pid"]: entry for entry in exporter.get("/api/v1/processes")["processes"]}
    names = {inside.pid: inside.pid, None: f"{beside.pid}@{entries[None]['pid_namespace']}:{os.geteuid()}"}
    assert {host_pid: entry["pid"] for host_pid, entry in entries.items()} == names
    assert {entry["own_pid"] for entry in entries.values()} == {inside.pid, beside.pid}
    for entry in entries.values():
        (device,) = entry["devices"]
        assert (device["reserved_bytes"], device["used_bytes"], device["non_torch_bytes"]) == (reserved, None, None)

    for trainer, name in ((inside, names[inside.pid]), (beside, names[None])):
        trainer.call("free")
        request = {"action": "empty_cache", "target": {"pid": name}}
        answer = exporter.request("POST", "/api/v1/actions", request, {"Authorization": "Bearer right"})
        (row,) = json.loads(answer.body)["results"]
        assert (row["outcome"], row["freed_bytes"]) == ("done", reserved)
        trainer.finish()
    wait_for(lambda: exporter.get("/api/v1/processes")["processes"] == [], "their end")
    wait_for_polls(exporter)
    assert_others_are_unknown(exporter, node, 0)
    assert exporter.log().count("PID namespace") == 1
