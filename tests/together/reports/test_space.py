"""Space for the next job: allocatable bytes, limits, NCCL's bytes, what a job used, and who holds memory idly."""

from __future__ import annotations

import os
import re
from typing import Any

from gpumem_client.wire import procfs
from gpumem_client.wire.protocol import DeviceSample
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, RESERVED_BYTES, SHARED_BYTES, EmulatedNode
from tests.support.builders.builders import MIB, UUIDS, report
from tests.support.processes.running_command import run_command
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.servers.running_exporter import ScriptedHost, running_exporter
from tests.support.waiting import eventually


def report_this_process(exporter: ExporterProcess, sequence: int, *samples: DeviceSample, **changes: Any) -> None:
    """Send a report as this process, which the kernel confirms."""
    mine = {"start_time_ticks": procfs.start_time_ticks(), "pid_namespace": procfs.pid_namespace()}
    sent = report(os.getpid(), devices=samples, sequence=sequence, **mine, **changes)
    exporter.report(sent)


def command(url: str, *arguments: str) -> str:
    """Return what a command of the program prints."""
    ended = run_command(*arguments, "--url", url)
    assert ended.returncode == 0, ended
    return ended.stdout


def test_the_idle_cache_of_a_process_that_accepts_a_clear_is_allocatable(
    node: EmulatedNode, start_exporter: StartExporter
) -> None:
    exporter, pid, uuid = start_exporter(node), os.getpid(), node.books()[0].uuid
    node.set_process(pid, 0, 4 * GIB)
    free = 8 * GIB - RESERVED_BYTES - SHARED_BYTES - 4 * GIB
    cache: dict[str, Any] = {"allocated_bytes": GIB, "reserved_bytes": 3 * GIB, "reclaimable_bytes": 2 * GIB}
    idle = DeviceSample(uuid, **cache, idle_cache_bytes=GIB)

    def allocatable() -> float:
        return exporter.metrics().value("gpumem_device_allocatable_bytes", gpu="0")

    eventually(allocatable, lambda value: value == free)
    report_this_process(exporter, 1, DeviceSample(uuid, **cache), actions=("empty_cache",))
    assert allocatable() == free, "an unknown idle cache adds nothing"
    report_this_process(exporter, 2, idle, actions=("empty_cache",))
    assert allocatable() == free + GIB
    assert exporter.get("/api/v1/devices")["devices"][0]["allocatable_bytes"] == free + GIB
    rows = re.findall(r"^(\d) .* (\S+)G +\S+ +(\S+)G +8\.0G", command(exporter.url, "info"), re.MULTILINE)
    assert rows == [("0", "3.5", "4.5"), ("1", "7.5", "7.5")], "free and allocatable memory of each device"
    report_this_process(exporter, 3, idle, actions=("reset_peak",))
    assert allocatable() == free, "this process accepts no clear"


NCCL = """
import os, torch.distributed as distributed
from torch._C._distributed_c10d import Backend

class Communicator(Backend):
    statistics = {"total": 5 << 20, "persist": 2 << 20, "suspend": 3 << 20, "suspended": 0}

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)

    def getBackendName(self):
        return "nccl"

    name = getBackendName

    def memory_stats(self):
        return self.statistics

# On Python 3.13 torch 2.15 crashes when it attaches its flight recorder to a backend in Python.
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", TORCH_FR_BUFFER_SIZE="0")
distributed.Backend.register_backend("mine", Communicator, devices=["cuda"])
store = distributed.HashStore()
"""


def test_a_process_reports_its_memory_limit_and_nccl_s_bytes(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.1")
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, CUDA_DEVICE_MEMORY_LIMIT_0="6144m", GPU_PORTION="0.9")
    process.call("alloc", nbytes=MIB)
    process.call("start_client", workload="train")
    exporter.wait_for_processes(process.pid)

    def values(name: str) -> list[float]:
        return exporter.metrics().values(name, gpu="0", pid=str(process.pid))

    eventually(lambda: values("gpumem_process_memory_limit_bytes"), lambda found: found == [6 * GIB])
    assert values("gpumem_torch_nccl_bytes") == [], "there is no communicator"
    process.exec("torch.cuda.set_per_process_memory_fraction(0.5, 0)")
    total = process.exec("result = torch.cuda.get_device_properties(0).total_memory")
    eventually(lambda: values("gpumem_process_memory_limit_bytes"), lambda found: found == [total // 2])

    if not process.exec("result = hasattr(torch._C._distributed_c10d.Backend, 'memory_stats')"):
        return  # before torch 2.15
    process.exec(NCCL + "distributed.init_process_group('mine', store=store, rank=0, world_size=1)")
    eventually(lambda: values("gpumem_torch_nccl_bytes"), lambda found: found == [5 * MIB])
    process.exec("distributed.new_group([0], backend='mine'); distributed.new_group([0], backend='gloo')")
    eventually(lambda: values("gpumem_torch_nccl_bytes"), lambda found: found == [10 * MIB])
    process.exec("Communicator.statistics = {**Communicator.statistics, 'suspended': 1}")
    eventually(lambda: values("gpumem_torch_nccl_bytes"), lambda found: found == [4 * MIB])
    process.exec("del Communicator.memory_stats")  # as with an NCCL that has no such function
    eventually(lambda: values("gpumem_torch_nccl_bytes"), lambda found: found == [])


class SlurmHost(ScriptedHost):
    """A host on which every process is in the cgroup of a Slurm job."""

    def slurm_job(self, pid: int | None) -> str | None:
        return "4711"


def test_the_job_of_the_cgroup_replaces_the_job_that_a_report_claims() -> None:
    sample = DeviceSample(UUIDS[0], allocated_bytes=GIB, reserved_bytes=GIB, reclaimable_bytes=0)
    with running_exporter(host=SlurmHost()) as exporter:
        assert exporter.report(report(7, devices=(sample,), slurm_job_id="4712")).status == 200
        assert exporter.get("/api/v1/jobs/4712").status == 404
        assert [row["pid"] for row in exporter.document("/api/v1/jobs/4711")["processes"]] == [7]
        mine, another = str(os.geteuid()), str(os.geteuid() + 1)
        assert "Still running: 1 of 1 process." in command(exporter.url, "report", "--job", "4711", "--user", mine)
        assert exporter.get(f"/api/v1/jobs/4711?uid={another}").status == 404


def test_a_job_s_report_has_its_peak_mean_and_idle_cache_also_after_it_ended(
    node: EmulatedNode, start_exporter: StartExporter
) -> None:
    exporter, pid, uuid = start_exporter(node, "--collect.interval", "0.1"), os.getpid(), node.books()[0].uuid

    def used_peak() -> int:
        (process,) = exporter.get("/api/v1/jobs/4711")["processes"]
        (device,) = process["devices"]
        found: int = device["used_peak_bytes"]
        return found

    def sample(reserved_peak: int, idle: int | None) -> DeviceSample:
        cache: dict[str, Any] = {"allocated_bytes": GIB, "reserved_bytes": 2 * GIB, "reclaimable_bytes": GIB}
        return DeviceSample(uuid, **cache, reserved_peak_bytes=reserved_peak, idle_cache_bytes=idle)

    node.set_process(pid, 0, 4 * GIB)
    report_this_process(exporter, 1, sample(3 * GIB, None), slurm_job_id="4711")
    eventually(used_peak, lambda found: found == 4 * GIB)
    node.set_process(pid, 0, 2 * GIB)
    report_this_process(exporter, 2, sample(2 * GIB, GIB), slurm_job_id="4711")
    report_this_process(exporter, 3, sample(2 * GIB, GIB), slurm_job_id="4711")
    eventually(lambda: exporter.get("/api/v1/jobs/4711")["processes"][0]["devices"][0]["used_mean_bytes"] < 4 * GIB)
    report_this_process(exporter, 4, slurm_job_id="4711", final=True)
    (ended,) = exporter.get("/api/v1/jobs/4711")["processes"]
    assert (ended["pid"], ended["workload"], ended["end_unix_seconds"] is None) == (pid, "train", False)
    (device,) = ended["devices"]
    assert 2 * GIB < device.pop("used_mean_bytes") < 4 * GIB
    highest = {"used_peak_bytes": 4 * GIB, "reserved_highest_bytes": 3 * GIB}
    assert device == {"gpu": "0", "uuid": uuid, **highest, "idle_cache_mean_bytes": GIB}
    text = command(exporter.url, "report", "--job", "4711")
    assert "Highest peak of a process on a device: 4.0 GiB." in text
    assert "running" not in text


def test_a_notebook_that_sleeps_is_inactive_and_a_job_that_only_allocates_for_a_moment_is_not(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.1")
    notebook, evaluation = (start_torch(GPUMEM_EXPORTER_URL=exporter.url) for _ in range(2))
    for process, size in ((notebook, 2765 * MIB), (evaluation, GIB)):
        process.call("alloc", nbytes=size)
        process.call("start_client", workload="notebook" if process is notebook else "eval")
        exporter.wait_for_processes(process.pid)

    def last(pid: int) -> float:
        return exporter.metrics().value("gpumem_process_last_activity_timestamp_seconds", pid=str(pid))

    def reported(pid: int) -> float:
        return exporter.metrics().value("gpumem_reporter_last_report_timestamp_seconds", pid=str(pid))

    slept, evaluated = last(notebook.pid), last(evaluation.pid)

    def both_moved_on() -> bool:
        # What is allocated is the same in every sample.
        evaluation.exec("x = torch.empty(1 << 20, device='cuda:0'); del x")
        return reported(notebook.pid) > slept + 4 and last(evaluation.pid) > evaluated + 4

    eventually(both_moved_on, bool)
    assert last(notebook.pid) == slept
    notebook.exec("x = torch.empty(1 << 20, device='cuda:0'); del x")
    eventually(lambda: last(notebook.pid), lambda now: now > slept + 2)
