"""Samples of the processes on the devices: their memory from NVML, their description from host and reporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.naming import pid_order
from gpumem_exporter.core.samples import ProcessFacts

__all__ = ["PROCESS"]


def _processes(view: View) -> Iterator[Subject]:
    """Yield the processes that the driver lists on each device, and the description of each process.

    Reporters are described even if the driver does not answer.
    """
    for device, listed in zip(view.devices, view.listed, strict=True):
        key = (device.gpu, device.uuid)
        pids = tuple([process.pid for process in listed])
        used = tuple([process.used_bytes for process in listed])
        yield key, Samples((key, pids), _used_series, used)
    rows = _info_rows(view, view.node.facts if view.node is not None else {})
    only_reporting = len(rows) == len(view.names.reporting)  # these are already in order
    for pid in rows if only_reporting else sorted(rows, key=pid_order):
        yield pid, Samples((pid, rows[pid]), _info_series, (1,))


def _used_series(device: tuple[str, str], pids: tuple[int, ...]) -> Iterator[Series]:
    for pid in pids:
        yield catalog.PROCESS_USED, (*device, str(pid))


def _info_series(pid: str, row: tuple[str, ...]) -> Iterator[Series]:
    yield catalog.PROCESS_INFO, (pid, *row)


def _info_rows(view: View, facts_by_pid: Mapping[int, ProcessFacts]) -> dict[str, tuple[str, ...]]:
    """Return the labels of each process that the driver lists or that reports, without the pid, by name."""
    rows: dict[str, tuple[str, ...]] = {}
    for pid, process in view.names.reporting:
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
    for pid, reporter in view.names.silent:
        facts = _facts(facts_by_pid, reporter.host_pid, reporter.start_time_ticks)
        rows[pid] = (reporter.workload, reporter.rank, *_host_labels(facts), *_jobs(facts), "false", "", "")
    for listed_pid in {process.pid for listed in view.listed for process in listed}:
        if str(listed_pid) not in rows:
            facts = facts_by_pid.get(listed_pid)
            rows[str(listed_pid)] = ("", "", *_host_labels(facts), *_jobs(facts), "false", "", "")
    return rows


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


PROCESS = Collector("process", (catalog.PROCESS_INFO, catalog.PROCESS_USED), _processes)
