"""Samples of PyTorch's allocators from the reports of the processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from operator import attrgetter
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject, Value
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.plan_errors import plan_error_ratio
from gpumem_exporter.core.samples import ReportingProcess

__all__ = ["TORCH", "AllocatorSource"]

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
_sampled_values = attrgetter(*_SAMPLED.values())


class AllocatorSource(NamedTuple):
    """Everything that the samples of a process' allocator depend on. The reports of an idle process have equal ones."""

    devices: tuple[DeviceSample, ...]
    step: int | None
    pinned_host_bytes: int | None
    process: tuple[str, str, str]
    """The labels of the process: pid, workload, rank."""
    gpu_by_uuid: Mapping[str, str]
    """The index of each device; other devices get `gpu=""`."""

    @classmethod
    def of(cls, process: ReportingProcess, pid: str, gpu_by_uuid: Mapping[str, str]) -> AllocatorSource:
        """Return the source of a process that has the name `pid` on the page."""
        report = process.report
        labels = (pid, report.process.workload, report.process.rank)
        return cls(report.devices, report.step, report.pinned_host_bytes, labels, gpu_by_uuid)

    def samples(self) -> Samples:
        """Compute the samples: those of each device, then the memory that is on no device."""
        devices: list[tuple[str, str, tuple[str, ...], tuple[str, ...]]] = []
        values: list[Value] = []
        for sample in self.devices:
            phases, components = sorted(sample.phase_peak_bytes), sorted(sample.component_bytes)
            gpu = self.gpu_by_uuid.get(sample.uuid, "")
            devices.append((gpu, sample.uuid, tuple(phases), tuple(components)))
            values += _sampled_values(sample)
            values += _derived_values(sample, self.step)
            values += [sample.phase_peak_bytes[phase] for phase in phases]
            values += [sample.component_bytes[component] for component in components]
            values.append(sample.memory_limit_bytes)
        labels = (self.process, tuple(devices))
        return Samples(labels, _series, (*values, self.pinned_host_bytes))


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
    process: tuple[str, str, str], devices: tuple[tuple[str, str, tuple[str, ...], tuple[str, ...]], ...]
) -> Iterator[Series]:
    for gpu, uuid, phases, components in devices:
        labels = (gpu, uuid, *process)
        for metric in (*_SAMPLED, *_DERIVED):
            yield metric, labels
        for phase in phases:
            yield catalog.TORCH_PHASE_PEAK, (*labels, phase)
        for component in components:
            yield catalog.TORCH_COMPONENT, (*labels, component)
        yield catalog.PROCESS_MEMORY_LIMIT, (gpu, uuid, process[0])
    yield catalog.TORCH_PINNED_HOST, process


def _allocators(view: View) -> Iterator[Subject]:
    for pid, process in view.names.reporting:
        yield process.key, AllocatorSource.of(process, pid, view.gpu_by_uuid)


TORCH = Collector(
    "torch",
    (
        *(*_SAMPLED, *_DERIVED, catalog.TORCH_PHASE_PEAK, catalog.TORCH_COMPONENT),
        *(catalog.PROCESS_MEMORY_LIMIT, catalog.TORCH_PINNED_HOST),
    ),
    _allocators,
)
