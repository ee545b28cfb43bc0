"""Samples of processes, reporters and inference engines, and of the out-of-memory errors of the last hour."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from gpumem_client.wire.protocol import KV_CACHE_STATES
from gpumem_exporter.collectors import catalog, engine_catalog
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject, Value, View, one_of_each
from gpumem_exporter.core.naming import command_of, pid_order
from gpumem_exporter.core.samples import IDENTITY_FIELDS, KV_PEAK_WINDOWS, NodeReading, ProcessFacts

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
        listed = sorted(device.processes or (), key=attrgetter("pid"))
        pids = tuple([process.pid for process in listed])
        yield key, Samples((key, pids), _used_series, tuple([process.used_bytes for process in listed]))
        orphans = tuple([(pid, view.snapshot.orphans[pid].reason) for pid in pids if pid in view.snapshot.orphans])
        if orphans:
            yield ("orphans", *key), Samples((key, orphans), _orphan_series, (1,) * len(orphans))
    rows = _info_rows(view, view.node or _NO_READING)
    for pid in sorted(rows, key=pid_order):
        row = _without_identities(rows[pid]) if view.hide_identities else rows[pid]
        yield pid, Samples((pid, row), _info_series, (1,))


def _used_series(device: tuple[str, str], pids: tuple[int, ...]) -> Iterator[Series]:
    for pid in pids:
        yield catalog.PROCESS_USED, (*device, str(pid))


def _orphan_series(device: tuple[str, str], orphans: tuple[tuple[int, str], ...]) -> Iterator[Series]:
    for pid, reason in orphans:
        yield catalog.PROCESS_ORPHAN, (*device, str(pid), reason)


def _info_series(pid: str, row: tuple[str, ...]) -> Iterator[Series]:
    yield catalog.PROCESS_INFO, (pid, *row)


def _info_rows(view: View, node: NodeReading) -> dict[str, tuple[str, ...]]:
    """Return the labels of each process that the driver lists or that reports, without the pid, by name."""
    rows: dict[str, tuple[str, ...]] = {}
    for pid, process in view.names.reporting:
        own = process.report.process
        facts = node.facts_of(process) or _UNKNOWN
        job = (own.slurm_job_id, own.slurm_account, own.ray_job_id)
        row = _described(facts, own.workload, own.rank, own.command, job)
        rows[pid] = (*row, "true", own.torch_version, own.allocator_settings)
    for pid, reporter in view.names.silent:
        row = _described(node.facts_of(reporter) or _UNKNOWN, reporter.workload, reporter.rank)
        rows[pid] = (*row, "false", "", "")
    for listed_pid in {process.pid for device in view.devices for process in device.processes or ()}:
        row = _described(node.facts.get(listed_pid, _UNKNOWN))
        rows.setdefault(str(listed_pid), (*row, "false", "", ""))
    return rows


def _described(
    facts: ProcessFacts,
    workload: str = "",
    rank: str = "",
    command: str = "",
    job: tuple[str, str, str] = ("", "", ""),
) -> tuple[str, ...]:
    """Return the labels from workload to ray_job_id. The reported `job` (the last three) precedes the host's."""
    of_host_job = (facts.slurm_job_id, facts.slurm_account, facts.ray_job_id)
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
        *(own or of_host for own, of_host in zip(job, of_host_job, strict=True)),
    )


def _without_identities(row: tuple[str, ...]) -> tuple[str, ...]:
    """Return the labels of a process with those after workload and rank empty, as far as they identify it."""
    return (*row[:2], *("" for _ in IDENTITY_FIELDS), *row[2 + len(IDENTITY_FIELDS) :])


def _reporters(view: View) -> Iterator[Subject]:
    """Yield the state of each reporter, the time of its last report, and the time of its sample."""
    rows: dict[str, Samples] = {}
    for pid, process in view.names.reporting:
        identity, received = process.report.process, process.received_unix_seconds
        values = (1, received, received - process.report.sample_age_seconds)
        rows[pid] = Samples((pid, identity.workload, identity.rank), _reporter_series, values)
    for pid, silent in view.names.silent:
        labels = (pid, silent.workload, silent.rank)
        rows[pid] = Samples(labels, _reporter_series, (0, silent.last_report_unix_seconds, None))
    for pid in sorted(rows, key=pid_order):
        yield pid, rows[pid]


def _ooms(view: View) -> Iterator[Subject]:
    """Yield the last error of each process on each device, with the labels at the time of the error.

    The process may have exited. If the index of the device was unknown at the time of the error, because the driver had
    not been polled, the current index is used.
    """
    for oom in sorted(view.snapshot.ooms, key=lambda oom: (pid_order(oom.pid), oom.uuid)):
        labels = (oom.gpu or view.gpu_by_uuid.get(oom.uuid, ""), oom.uuid, oom.pid, oom.workload, oom.rank)
        yield (oom.uuid, oom.pid), Samples(labels, _oom_series, _oom_values(oom))


def _engines(view: View) -> Iterator[Subject]:
    """Yield what each inference engine is, and the use of its key-value cache on each device."""
    for pid, process in view.names.reporting:
        report = process.report
        labels = (pid, report.process.workload, report.process.rank)
        engine = report.engine
        if engine is not None:
            model = "" if view.hide_identities else engine.model
            row = (*labels, engine.name, engine.version, model, engine.state)
            yield (process.key, ""), Samples(row, _engine_series, (1,))
        for sample in report.devices:
            if not sample.kv_cache_bytes:
                continue
            values: list[Value] = [sample.kv_cache_bytes.get(state) for state in KV_CACHE_STATES]
            for window in KV_PEAK_WINDOWS:
                peak = view.snapshot.kv_cache_peak(pid, sample, window)
                values += (None, None) if peak is None else peak
            place = (view.gpu_by_uuid.get(sample.uuid, ""), sample.uuid, *labels)
            yield (process.key, sample.uuid), Samples(place, _cache_series, tuple(values))


def _engine_series(*row: str) -> Iterator[Series]:
    yield engine_catalog.ENGINE_INFO, row


def _cache_series(*labels: str) -> Iterator[Series]:
    for state in KV_CACHE_STATES:
        yield engine_catalog.ENGINE_KV_CACHE, (*labels, state)
    for window in KV_PEAK_WINDOWS:
        yield engine_catalog.ENGINE_KV_CACHE_PEAK, (*labels, window)
        yield engine_catalog.ENGINE_KV_CACHE_OBSERVED, (*labels, window)


PROCESS = Collector("process", (catalog.PROCESS_INFO, catalog.PROCESS_USED, catalog.PROCESS_ORPHAN), _processes)
REPORTER = Collector("reporter", _REPORTER_FAMILIES, _reporters)
OOM = Collector("oom", tuple(_OOM_VALUES), _ooms)
ENGINE = Collector("engine", engine_catalog.ENGINES, _engines)
