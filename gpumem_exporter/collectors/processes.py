"""Samples of the processes on the devices: their memory from NVML, their description from host and reporter."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.naming import command_of, pid_order
from gpumem_exporter.core.samples import IDENTITY_FIELDS, ProcessFacts, ProcessMemory, ReportingProcess, SilentReporter

__all__ = ["PROCESS"]

_UNKNOWN = ProcessFacts(0, 0)


class _UsedSource(NamedTuple):
    """What the driver lists on a device; the same object until the next poll."""

    device: tuple[str, str]
    processes: tuple[ProcessMemory, ...]

    def samples(self) -> Samples:
        """Compute the samples, sorted by pid."""
        listed = sorted(self.processes, key=attrgetter("pid"))
        pids = tuple([process.pid for process in listed])
        return Samples((self.device, pids), _used_series, tuple([process.used_bytes for process in listed]))


def _processes(view: View) -> Iterator[Subject]:
    """Yield the processes that the driver lists on each device, and the description of each process.

    Reporters are described even if the driver does not answer.
    """
    for device in view.devices:
        key = (device.gpu, device.uuid)
        yield key, _UsedSource(key, device.processes or ())
    rows = _info_rows(view, view.node.facts if view.node is not None else {})
    for pid in sorted(rows, key=pid_order):
        row = _without_identities(rows[pid]) if view.hide_identities else rows[pid]
        yield pid, Samples((pid, row), _info_series, (1,))


def _used_series(device: tuple[str, str], pids: tuple[int, ...]) -> Iterator[Series]:
    for pid in pids:
        yield catalog.PROCESS_USED, (*device, str(pid))


def _info_series(pid: str, row: tuple[str, ...]) -> Iterator[Series]:
    yield catalog.PROCESS_INFO, (pid, *row)


def _info_rows(view: View, facts_by_pid: Mapping[int, ProcessFacts]) -> dict[str, tuple[str, ...]]:
    """Return the labels of each process that the driver lists or that reports, without the pid, by name."""
    rows: dict[str, tuple[str, ...]] = {}
    for pid, process in view.names.reporting:
        own = process.report.process
        facts = _facts(facts_by_pid, process)
        row = _described(facts, own.workload, own.rank, own.command, own.slurm_job_id, own.ray_job_id)
        rows[pid] = (*row, "true", own.torch_version, own.allocator_settings)
    for pid, reporter in view.names.silent:
        row = _described(_facts(facts_by_pid, reporter), reporter.workload, reporter.rank)
        rows[pid] = (*row, "false", "", "")
    for listed_pid in {process.pid for device in view.devices for process in device.processes or ()}:
        row = _described(facts_by_pid.get(listed_pid, _UNKNOWN))
        rows.setdefault(str(listed_pid), (*row, "false", "", ""))
    return rows


def _facts(facts_by_pid: Mapping[int, ProcessFacts], reporter: ReportingProcess | SilentReporter) -> ProcessFacts:
    """Return the host's facts of a process, unless they are of another process with the same pid."""
    facts = facts_by_pid.get(reporter.host_pid, _UNKNOWN) if reporter.host_pid is not None else _UNKNOWN
    return facts if facts.start_time_ticks == reporter.start_time_ticks else _UNKNOWN


def _described(
    facts: ProcessFacts,
    workload: str = "",
    rank: str = "",
    command: str = "",
    slurm_job_id: str = "",
    ray_job_id: str = "",
) -> tuple[str, ...]:
    """Return the labels from workload to ray_job_id.

    The reported job ids precede the host's.
    """
    return (
        workload,
        rank,
        command_of(facts.command, command),
        facts.user,
        facts.container_id,
        facts.k8s_pod_uid,
        facts.k8s_namespace,
        facts.k8s_pod,
        facts.k8s_container,
        slurm_job_id or facts.slurm_job_id,
        ray_job_id or facts.ray_job_id,
    )


def _without_identities(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a process with those after workload and rank empty, as far as they identify it."""
    return (*row[:2], *("" for _ in IDENTITY_FIELDS), *row[2 + len(IDENTITY_FIELDS) :])


PROCESS = Collector("process", (catalog.PROCESS_INFO, catalog.PROCESS_USED), _processes)
