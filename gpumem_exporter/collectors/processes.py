"""Series of the processes on the devices: as NVML sees them, and what host and reporter say that they are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Column
from gpumem_exporter.collectors.view import Devices, View, pid_order
from gpumem_exporter.core.samples import ProcessFacts

__all__ = ["info_samples", "process_samples", "used_samples"]


def process_samples(view: View) -> Iterator[Column]:
    """What each process uses, and what it is."""
    yield from used_samples(view.on)
    yield from info_samples(view)


def used_samples(on: Devices) -> Iterator[Column]:
    """What each process uses of each device, as the driver says."""
    for device, listed in zip(on.devices, on.listed, strict=True):
        pids = tuple([process.pid for process in listed])
        used = [process.used_bytes for process in listed]
        yield Column(catalog.PROCESS_USED, (device.gpu, device.uuid), pids, used, _pid_label)


def info_samples(view: View) -> Iterator[Column]:
    """One info series for each pid: those the driver lists and those that report.

    What reporters say of themselves does not need the driver.
    """
    listed_pids = {process.pid for listed in view.on.listed for process in listed}
    yield from _infos(view, view.node.facts if view.node is not None else {}, listed_pids)


def _pid_label(pid: int) -> tuple[str]:
    return (str(pid),)


def _infos(view: View, facts_by_pid: Mapping[int, ProcessFacts], listed_pids: set[int]) -> Iterator[Column]:
    rows: dict[str, tuple[str, ...]] = {}
    for pid, process in view.reporting:
        identity = process.report.process
        facts = _facts(facts_by_pid, process.host_pid, identity.start_time_ticks)
        rows[pid] = (
            identity.workload,
            identity.rank,
            *_host_labels(facts, command=identity.command),
            *_jobs(facts, identity.slurm_job_id, identity.ray_job_id),
            "true",
            identity.torch_version,
            identity.allocator_settings,
        )
    for pid, reporter in view.silent:
        facts = _facts(facts_by_pid, reporter.host_pid, reporter.start_time_ticks)
        rows[pid] = (reporter.workload, reporter.rank, *_host_labels(facts), *_jobs(facts), "false", "", "")
    for listed_pid in listed_pids:
        facts = facts_by_pid.get(listed_pid)
        rows.setdefault(str(listed_pid), ("", "", *_host_labels(facts), *_jobs(facts), "false", "", ""))
    only_reporting = len(rows) == len(view.reporting)
    pids = rows if only_reporting else sorted(rows, key=pid_order)  # those that report are in order
    tails = tuple([(pid, *rows[pid]) for pid in pids])
    yield Column(catalog.PROCESS_INFO, (), tails, [1] * len(tails))


def _facts(
    facts_by_pid: Mapping[int, ProcessFacts], host_pid: int | None, start_time_ticks: int
) -> ProcessFacts | None:
    """What the host says of this very process, not of another that had or has its pid."""
    facts = facts_by_pid.get(host_pid) if host_pid is not None else None
    return facts if facts is not None and facts.start_time_ticks == start_time_ticks else None


def _host_labels(facts: ProcessFacts | None, command: str = "") -> tuple[str, ...]:
    """Command to k8s_container. `command` is what the process says of itself, for where the host says nothing."""
    if facts is None:
        return (command, "", "", "", "", "", "")
    return (
        facts.command or command,
        facts.user,
        facts.container_id,
        facts.k8s_pod_uid,
        facts.k8s_namespace,
        facts.k8s_pod,
        facts.k8s_container,
    )


def _jobs(facts: ProcessFacts | None, slurm_job_id: str = "", ray_job_id: str = "") -> tuple[str, str]:
    """Slurm's and Ray's job: what the process says of itself, else what the host could read."""
    if facts is None:
        return (slurm_job_id, ray_job_id)
    return (slurm_job_id or facts.slurm_job_id, ray_job_id or facts.ray_job_id)
