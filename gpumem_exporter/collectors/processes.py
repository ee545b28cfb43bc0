"""Samples of the processes on the devices: their memory from NVML, their description from host and reporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Column
from gpumem_exporter.collectors.view import OrderedDevices, View, pid_order
from gpumem_exporter.core.samples import ProcessFacts

__all__ = ["info_samples", "process_samples", "used_samples"]


def process_samples(view: View) -> Iterator[Column]:
    """Yield the used bytes and the description of each process."""
    yield from used_samples(view.ordered)
    yield from info_samples(view)


def used_samples(ordered: OrderedDevices) -> Iterator[Column]:
    """Yield the driver's value of the bytes that each process uses on each device."""
    for device, listed in zip(ordered.devices, ordered.listed, strict=True):
        pids = tuple([process.pid for process in listed])
        used = [process.used_bytes for process in listed]
        yield Column(catalog.PROCESS_USED, (device.gpu, device.uuid), pids, used, _pid_label)


def info_samples(view: View) -> Iterator[Column]:
    """Yield one info series for each pid that the driver lists or that reports.

    Reporters are included even if the driver does not answer.
    """
    listed_pids = {process.pid for listed in view.ordered.listed for process in listed}
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
    pids = rows if only_reporting else sorted(rows, key=pid_order)  # reporting processes are already in order
    tails = tuple([(pid, *rows[pid]) for pid in pids])
    yield Column(catalog.PROCESS_INFO, (), tails, [1] * len(tails))


def _facts(
    facts_by_pid: Mapping[int, ProcessFacts], host_pid: int | None, start_time_ticks: int
) -> ProcessFacts | None:
    """Return the host's facts of a process; None if they are of another process with the same pid."""
    facts = facts_by_pid.get(host_pid) if host_pid is not None else None
    return facts if facts is not None and facts.start_time_ticks == start_time_ticks else None


def _host_labels(facts: ProcessFacts | None, command: str = "") -> tuple[str, ...]:
    """Return the labels from command to k8s_container; `command` is the reported one, used if the host has none."""
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
    """Return the Slurm and Ray job ids: the reported ones, otherwise those from the host."""
    if facts is None:
        return (slurm_job_id, ray_job_id)
    return (slurm_job_id or facts.slurm_job_id, ray_job_id or facts.ray_job_id)
