"""Samples of processes and reporters."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from operator import attrgetter

from gpumem_exporter.core.naming import command_of
from gpumem_exporter.core.readings import IDENTITY_FIELDS, NodeReading, ProcessFacts, ProcessMemory
from gpumem_exporter.core.samples import ReportingProcess, SilentReporter
from gpumem_exporter.metrics import catalog
from gpumem_exporter.metrics.collector_types import Collector, Sample, Samples, Subject, View, listed

_UNKNOWN = ProcessFacts(0, 0)
_NO_READING = NodeReading(0.0, 0.0, 0.0, up=False)
# The command is of the host or of the report.
_identity = attrgetter(*(name for name in IDENTITY_FIELDS if name != "command"))
_REPORTER_FAMILIES = (catalog.REPORTER_UP, catalog.REPORTER_TIMESTAMP, catalog.SAMPLE_TIMESTAMP)


def _processes(view: View) -> Iterator[Subject]:
    """Yield the processes that the driver lists on each device, and the description of each process.

    Reporters are described even if the driver does not answer.
    """
    for device in view.devices:
        key = (device.gpu, device.uuid)
        yield Subject(key, _used_samples, (key, device.processes or ()))
    node = view.node or _NO_READING
    for pid, process in view.names.reporting:
        yield Subject(pid, _info_samples, (pid, process, node.facts_of(process) or _UNKNOWN, view.hide_identities))
    for pid, reporter in view.names.silent:
        yield Subject(pid, _info_samples, (pid, reporter, node.facts_of(reporter) or _UNKNOWN, view.hide_identities))
    yield Subject("activity", listed, (_activity(view),))
    # One subject for all of them: they change only with the driver's lists, and not with a report.
    reporters = frozenset([pid for pid, _ in (*view.names.reporting, *view.names.silent)])
    lists = tuple([device.processes for device in view.devices])
    yield Subject("others", _others_samples, (reporters, lists, node.facts, view.hide_identities))


def _used_samples(device: tuple[str, str], processes: Iterable[ProcessMemory]) -> Samples:
    return listed(
        (catalog.PROCESS_USED, (*device, str(process.pid)), process.used_bytes)
        for process in sorted(processes, key=attrgetter("pid"))
    )


def _activity(view: View) -> list[Sample]:
    """Return the time of the last activity of each process of which it is known."""
    reporters = {process.host_pid: process for _, process in view.names.reporting}
    named: list[tuple[str, ReportingProcess | None, int | None]]
    named = [(pid, process, process.host_pid) for pid, process in view.names.reporting]
    named += [(str(pid), None, pid) for pid in sorted(view.snapshot.activity) if pid not in reporters]
    return [
        (catalog.PROCESS_LAST_ACTIVITY, (pid,), round(view.snapshot.unix_seconds(seconds, process), 1))
        for pid, process, host_pid in named
        if (seconds := view.snapshot.last_active_seconds(process, host_pid)) is not None
    ]


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
    return listed([(catalog.PROCESS_INFO, (pid, *row), 1)])


def _others_samples(
    reporters: Container[str],
    devices: Iterable[Iterable[ProcessMemory] | None],
    facts: Mapping[int, ProcessFacts],
    hide_identities: bool,
) -> Samples:
    """Return the descriptions of the processes that the driver lists and that do not report."""
    pids = sorted({process.pid for processes in devices for process in processes or ()})
    rows = [
        (str(pid), *_described(facts.get(pid, _UNKNOWN), hide_identities=hide_identities), "false", "", "")
        for pid in pids
        if str(pid) not in reporters
    ]
    return listed((catalog.PROCESS_INFO, row, 1) for row in rows)


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
    slurm_job_id, slurm_account, ray_job_id = job
    ray_job_id = ray_job_id or facts.ray_job_id
    if hide_identities:
        return workload, rank, *("" for _ in IDENTITY_FIELDS), "", "", ray_job_id
    shown = (slurm_job_id or facts.slurm_job_id, slurm_account or facts.slurm_account, ray_job_id)
    return workload, rank, command_of(facts.command, command), *_identity(facts), *shown


def _reporters(view: View) -> Iterator[Subject]:
    """Yield the state of each reporter, the time of its last report, and the time of its sample."""
    for pid, process in view.names.reporting:
        identity, received = process.report.process, process.received_unix_seconds
        labels, sampled = (pid, identity.workload, identity.rank), received - process.report.sample_age_seconds
        yield Subject(pid, _reporter_samples, (labels, 1, received, sampled))
    for pid, silent in view.names.silent:
        labels = (pid, silent.workload, silent.rank)
        yield Subject(pid, _reporter_samples, (labels, 0, silent.last_report_unix_seconds, None))


def _reporter_samples(labels: tuple[str, str, str], *values: float | None) -> Samples:
    return listed((metric, labels, value) for metric, value in zip(_REPORTER_FAMILIES, values, strict=True))


PROCESS = Collector(
    "processes",
    (catalog.PROCESS_INFO, catalog.PROCESS_USED, catalog.PROCESS_LAST_ACTIVITY),
    _processes,
)
REPORTER = Collector("reporters", _REPORTER_FAMILIES, _reporters)
