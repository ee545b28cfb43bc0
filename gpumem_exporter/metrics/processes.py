"""Samples of processes and reporters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from operator import attrgetter

from gpumem_exporter.core.naming import command_of
from gpumem_exporter.core.samples import (
    IDENTITY_FIELDS,
    LostLauncher,
    NodeReading,
    ProcessFacts,
    ProcessMemory,
    ReportingProcess,
    SilentReporter,
)
from gpumem_exporter.metrics import catalog
from gpumem_exporter.metrics.collector_types import Collector, Samples, Series, Subject, View, one_of_each

_UNKNOWN = ProcessFacts(0, 0)
_NO_READING = NodeReading(0.0, 0.0, 0.0, up=False)
_REPORTER_FAMILIES = (catalog.REPORTER_UP, catalog.REPORTER_TIMESTAMP, catalog.SAMPLE_TIMESTAMP)
_reporter_series = one_of_each(_REPORTER_FAMILIES)


def _processes(view: View) -> Iterator[Subject]:
    """Yield the processes that the driver lists on each device, and the description of each process.

    Reporters are described even if the driver does not answer.
    """
    for device in view.devices:
        key = (device.gpu, device.uuid)
        yield Subject(key, _used_samples, (key, device.processes or ()))
        if view.snapshot.orphans:
            yield Subject(("orphans", *key), _orphan_samples, (key, device.processes or (), view.snapshot.orphans))
    node = view.node or _NO_READING
    for pid, process in view.names.reporting:
        yield Subject(pid, _info_samples, (pid, process, node.facts_of(process) or _UNKNOWN, view.hide_identities))
    for pid, reporter in view.names.silent:
        yield Subject(pid, _info_samples, (pid, reporter, node.facts_of(reporter) or _UNKNOWN, view.hide_identities))
    yield Subject("activity", _activity_samples, (_activity(view),))
    # One subject for all of them: they change only with the driver's lists, and not with a report.
    reporters = frozenset([pid for pid, _ in (*view.names.reporting, *view.names.silent)])
    listed = tuple([device.processes for device in view.devices])
    yield Subject("others", _others_samples, (reporters, listed, node.facts, view.hide_identities))


def _used_samples(device: tuple[str, str], processes: Iterable[ProcessMemory]) -> Samples:
    listed = sorted(processes, key=attrgetter("pid"))
    pids = tuple([process.pid for process in listed])
    return Samples((device, pids), _used_series, tuple([process.used_bytes for process in listed]))


def _used_series(device: tuple[str, str], pids: tuple[int, ...]) -> Iterator[Series]:
    for pid in pids:
        yield catalog.PROCESS_USED, (*device, str(pid))


def _activity(view: View) -> tuple[tuple[str, float], ...]:
    """Return the time of the last activity of each process of which it is known, by name."""
    reporters = {process.host_pid: process for _, process in view.names.reporting}
    named: list[tuple[str, ReportingProcess | None, int | None]]
    named = [(pid, process, process.host_pid) for pid, process in view.names.reporting]
    named += [(str(pid), None, pid) for pid in sorted(view.snapshot.activity) if pid not in reporters]
    return tuple(
        (pid, round(view.snapshot.unix_seconds(seconds, process), 1))
        for pid, process, host_pid in named
        if (seconds := view.snapshot.last_active_seconds(process, host_pid)) is not None
    )


def _activity_samples(known: tuple[tuple[str, float], ...]) -> Samples:
    return Samples(tuple(pid for pid, _ in known), _activity_series, tuple(seconds for _, seconds in known))


def _activity_series(*pids: str) -> Iterator[Series]:
    for pid in pids:
        yield catalog.PROCESS_LAST_ACTIVITY, (pid,)


def _orphan_samples(
    device: tuple[str, str], processes: Iterable[ProcessMemory], orphans: Mapping[int, LostLauncher]
) -> Samples:
    found = tuple([(pid, orphans[pid].reason) for pid in sorted(orphans.keys() & {each.pid for each in processes})])
    return Samples((device, found), _orphan_series, (1,) * len(found))


def _orphan_series(device: tuple[str, str], orphans: tuple[tuple[int, str], ...]) -> Iterator[Series]:
    for pid, reason in orphans:
        yield catalog.PROCESS_ORPHAN, (*device, str(pid), reason)


def _info_samples(
    pid: str, reporter: ReportingProcess | SilentReporter, facts: ProcessFacts, hide_identities: bool
) -> Samples:
    """Return the description of a process that reports, or that has reported."""
    if isinstance(reporter, ReportingProcess):
        own = reporter.report.process
        job = (own.slurm_job_id, own.slurm_account, own.ray_job_id)
        row = _described(facts, own.workload, own.rank, own.command, job, hide_identities=hide_identities)
        row = (*row, "true", own.torch_version, own.allocator_settings)
    else:
        row = _described(facts, reporter.workload, reporter.rank, hide_identities=hide_identities)
        row = (*row, "false", "", "")
    return Samples(((pid, *row),), _info_series, (1,))


def _others_samples(
    reporters: Container[str],
    devices: Iterable[Iterable[ProcessMemory] | None],
    facts: Mapping[int, ProcessFacts],
    hide_identities: bool,
) -> Samples:
    """Return the descriptions of the processes that the driver lists and that do not report."""
    listed = {process.pid for processes in devices for process in processes or ()}
    rows = [
        (str(pid), *_described(facts.get(pid, _UNKNOWN), hide_identities=hide_identities), "false", "", "")
        for pid in sorted(listed)
        if str(pid) not in reporters
    ]
    return Samples(tuple(rows), _info_series, (1,) * len(rows))


def _info_series(*rows: tuple[str, ...]) -> Iterator[Series]:
    for row in rows:
        yield catalog.PROCESS_INFO, row


def _described(
    facts: ProcessFacts,
    workload: str = "",
    rank: str = "",
    command: str = "",
    job: tuple[str, str, str] = ("", "", ""),
    *,
    hide_identities: bool,
) -> tuple[str, ...]:
    """Return the labels from workload to ray_job_id. The reported `job` (the last three) precedes the host's."""
    of_host_job = (facts.slurm_job_id, facts.slurm_account, facts.ray_job_id)
    shown = [own or of_host for own, of_host in zip(job, of_host_job, strict=True)]
    identity = (
        command_of(facts.command, command),
        facts.user,
        facts.container_id,
        facts.k8s_pod_uid,
        facts.k8s_namespace,
        facts.k8s_pod,
        facts.k8s_container,
    )
    return (
        workload,
        rank,
        *(("",) * len(IDENTITY_FIELDS) if hide_identities else identity),
        *(("", "", shown[-1]) if hide_identities else shown),
    )


def _reporters(view: View) -> Iterator[Subject]:
    """Yield the state of each reporter, the time of its last report, and the time of its sample."""
    for pid, process in view.names.reporting:
        yield Subject(pid, _reporter_samples, (pid, process))
    for pid, silent in view.names.silent:
        labels = (pid, silent.workload, silent.rank)
        yield Subject(pid, Samples, (labels, _reporter_series, (0, silent.last_report_unix_seconds, None)))


def _reporter_samples(pid: str, process: ReportingProcess) -> Samples:
    identity, received = process.report.process, process.received_unix_seconds
    values = (1, received, received - process.report.sample_age_seconds)
    return Samples((pid, identity.workload, identity.rank), _reporter_series, values)


PROCESS = Collector(
    "processes",
    (catalog.PROCESS_INFO, catalog.PROCESS_USED, catalog.PROCESS_ORPHAN, catalog.PROCESS_LAST_ACTIVITY),
    _processes,
)
REPORTER = Collector("reporters", _REPORTER_FAMILIES, _reporters)
