"""Samples of processes, reporters and inference engines, and of the out-of-memory errors of the last hour."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from operator import attrgetter

from gpumem_client.wire.protocol import KV_CACHE_STATES
from gpumem_exporter.core.naming import command_of, pid_order
from gpumem_exporter.core.samples import (
    IDENTITY_FIELDS,
    KV_PEAK_WINDOWS,
    LostLauncher,
    NodeReading,
    ProcessFacts,
    ProcessMemory,
    ReportingProcess,
    SilentReporter,
)
from gpumem_exporter.metrics import catalog, engine_catalog
from gpumem_exporter.metrics.subjects import Collector, Samples, Series, Subject, Value, View, one_of_each

_UNKNOWN = ProcessFacts(0, 0)
_NO_READING = NodeReading(0.0, 0.0, 0.0, up=False)
_REPORTER_FAMILIES = (catalog.REPORTER_UP, catalog.REPORTER_TIMESTAMP, catalog.SAMPLE_TIMESTAMP)
_OOM_VALUES = {
    catalog.LAST_OOM_TIMESTAMP: "happened_unix_seconds",
    catalog.LAST_OOM_REQUESTED: "requested_bytes",
    catalog.LAST_OOM_DEVICE_FREE: "device_free_bytes",
    catalog.LAST_OOM_LIMIT: "limit_bytes",
    catalog.LAST_OOM_ALLOCATED: "allocated_bytes",
    catalog.LAST_OOM_RESERVED: "reserved_bytes",
    catalog.LAST_OOM_RECLAIMABLE: "reclaimable_bytes",
    catalog.LAST_OOM_FRAGMENTED: "fragmented_bytes",
}
_oom_values = attrgetter(*_OOM_VALUES.values())
_reporter_series, _oom_series = one_of_each(_REPORTER_FAMILIES), one_of_each(_OOM_VALUES)


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


def _ooms(view: View) -> Iterator[Subject]:
    """Yield the last error of each process on each device, with the labels at the time of the error."""
    # If the driver had not been polled then, the index of the device was unknown: the current one is used.
    for oom in sorted(view.snapshot.ooms, key=lambda oom: (pid_order(oom.pid), oom.uuid)):
        labels = (oom.gpu or view.gpu_by_uuid.get(oom.uuid, ""), oom.uuid, oom.pid, oom.workload, oom.rank)
        yield Subject((oom.uuid, oom.pid), Samples, (labels, _oom_series, _oom_values(oom)))


def _engines(view: View) -> Iterator[Subject]:
    """Yield what each inference engine is, and the use of its key-value cache on each device."""
    for pid, process in view.names.reporting:
        report, engine = process.report, process.report.engine
        labels = (pid, report.process.workload, report.process.rank)
        if engine is not None:
            model = "" if view.hide_identities else engine.model
            row = (*labels, engine.name, engine.version, model, engine.state)
            yield Subject((process.key, ""), Samples, (row, _engine_series, (1,)))
        for sample in report.devices:
            if not sample.kv_cache_bytes:
                continue
            values: list[Value] = [sample.kv_cache_bytes.get(state) for state in KV_CACHE_STATES]
            for window in KV_PEAK_WINDOWS:
                peak = view.snapshot.kv_cache_peak(pid, sample, window)
                values += (None, None) if peak is None else peak
            place = (view.gpu_by_uuid.get(sample.uuid, ""), sample.uuid, *labels)
            yield Subject((process.key, sample.uuid), Samples, (place, _cache_series, tuple(values)))


def _engine_series(*row: str) -> Iterator[Series]:
    yield engine_catalog.ENGINE_INFO, row


def _cache_series(*labels: str) -> Iterator[Series]:
    for state in KV_CACHE_STATES:
        yield engine_catalog.ENGINE_KV_CACHE, (*labels, state)
    for window in KV_PEAK_WINDOWS:
        yield engine_catalog.ENGINE_KV_CACHE_PEAK, (*labels, window)
        yield engine_catalog.ENGINE_KV_CACHE_OBSERVED, (*labels, window)


PROCESS = Collector(
    "process",
    (catalog.PROCESS_INFO, catalog.PROCESS_USED, catalog.PROCESS_ORPHAN, catalog.PROCESS_LAST_ACTIVITY),
    _processes,
)
REPORTER = Collector("reporter", _REPORTER_FAMILIES, _reporters)
OOM = Collector("oom", tuple(_OOM_VALUES), _ooms)
ENGINE = Collector("engine", engine_catalog.ENGINES, _engines)
