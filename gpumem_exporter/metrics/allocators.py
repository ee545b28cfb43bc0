"""Samples of PyTorch's allocators from the reports of the processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.samples import ReportingProcess, plan_error_ratio
from gpumem_exporter.metrics import catalog
from gpumem_exporter.metrics.collector_types import Collector, Samples, Series, Subject, Value, View

_SAMPLED = {
    catalog.TORCH_ALLOCATED: "allocated_bytes",
    catalog.TORCH_RESERVED: "reserved_bytes",
    catalog.TORCH_ACTIVE: "active_bytes",
    catalog.TORCH_INACTIVE_SPLIT: "inactive_split_bytes",
    catalog.TORCH_REQUESTED: "requested_bytes",
    catalog.TORCH_ALLOCATED_PEAK: "allocated_peak_bytes",
    catalog.TORCH_RESERVED_PEAK: "reserved_peak_bytes",
    catalog.TORCH_PLANNED_RESERVED_PEAK: "planned_reserved_peak_bytes",
    catalog.TORCH_RECLAIMABLE: "reclaimable_bytes",
    catalog.TORCH_IDLE_CACHE: "idle_cache_bytes",
    catalog.TORCH_UNMAPPED: "unmapped_bytes",
    catalog.TORCH_PRIVATE_POOLS: "private_pools_bytes",
    catalog.TORCH_ALLOC_RETRIES: "alloc_retries",
    catalog.TORCH_OOMS: "ooms",
    catalog.TORCH_SEGMENTS_ALLOCATED: "segments_allocated",
    catalog.TORCH_SEGMENTS_FREED: "segments_freed",
    catalog.TORCH_CACHE_FLUSHES: "cache_flushes",
    catalog.TORCH_PEAK_RESETS: "peak_resets",
    catalog.TORCH_NCCL: "nccl_bytes",
}
_DERIVED = (
    catalog.TORCH_STEP,
    catalog.TORCH_PLAN_ERROR_RATIO,
    catalog.TORCH_FRAGMENTED,
    catalog.TORCH_SLACK_RATIO,
    catalog.TORCH_FRAGMENTATION_RATIO,
)
_NAMED = {
    catalog.TORCH_PHASE_PEAK: "phase_peak_bytes",
    catalog.TORCH_COMPONENT: "component_bytes",
    catalog.TORCH_COMPONENT_UNMAPPED: "component_unmapped_bytes",
}
_FAMILIES = (*_SAMPLED, *_DERIVED, *_NAMED, catalog.PROCESS_MEMORY_LIMIT, catalog.TORCH_PINNED_HOST)
_sampled_values = attrgetter(*_SAMPLED.values())
_named_values = attrgetter(*_NAMED.values())


def _derived_values(sample: DeviceSample, step: int | None) -> tuple[Value, ...]:
    """Return the values of the metrics in `_DERIVED`, which no report contains directly."""
    allocated, reserved, fragmented = sample.allocated_bytes, sample.reserved_bytes, fragmented_bytes(sample)
    return (
        step,
        plan_error_ratio(sample, step),
        fragmented,
        (reserved - allocated) / reserved if reserved and allocated is not None else None,
        fragmented / reserved if reserved and fragmented is not None else None,
    )


def _series(
    process: tuple[str, str, str], devices: tuple[tuple[str, str, tuple[tuple[str, ...], ...]], ...]
) -> Iterator[Series]:
    for gpu, uuid, named in devices:
        labels = (gpu, uuid, *process)
        for metric in (*_SAMPLED, *_DERIVED):
            yield metric, labels
        for metric, names in zip(_NAMED, named, strict=True):
            for name in names:
                yield metric, (*labels, name)
        yield catalog.PROCESS_MEMORY_LIMIT, (gpu, uuid, process[0])
    yield catalog.TORCH_PINNED_HOST, process


def _samples(process: ReportingProcess, pid: str, gpu_by_uuid: Mapping[str, str]) -> Samples:
    """Return the samples of a process: the samples of each device, then the memory that is on no device."""
    report = process.report
    devices: list[tuple[str, str, tuple[tuple[str, ...], ...]]] = []
    values: list[Value] = []
    for sample in report.devices:
        named = _named_values(sample)
        names = tuple([tuple(each) for each in named])
        devices.append((gpu_by_uuid.get(sample.uuid, ""), sample.uuid, names))
        values += _sampled_values(sample)
        values += _derived_values(sample, report.step)
        for sizes in named:
            values += sizes.values()
        values.append(sample.memory_limit_bytes)
    labels = ((pid, report.process.workload, report.process.rank), tuple(devices))
    return Samples(labels, _series, (*values, report.pinned_host_bytes))


def _allocators(view: View) -> Iterator[Subject]:
    for pid, process in view.names.reporting:
        yield Subject(process.key, _samples, (process, pid, view.gpu_by_uuid))


TORCH = Collector("torch", _FAMILIES, _allocators)
