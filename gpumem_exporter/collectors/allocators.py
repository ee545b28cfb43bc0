"""Samples of PyTorch's allocators from the reports of the processes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Sample
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.ledger import fragmented_bytes
from gpumem_exporter.core.plan_errors import plan_error_ratio
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["REPORTED", "allocator_samples", "report_samples"]

REPORTED = tuple(
    metric
    for metric in catalog.SCRAPED
    if metric.name.startswith("gpumem_torch_") and metric is not catalog.TORCH_NON_TORCH
)
"""The families that depend on a report only, in the order of the page."""


def allocator_samples(view: View) -> Iterator[Sample]:
    """Yield the samples from the report of each process."""
    for pid, process in view.reporting:
        yield from report_samples(process, pid, view.gpu_by_uuid)


def report_samples(process: ReportingProcess, pid: str, gpu_by_uuid: Mapping[str, str]) -> Iterator[Sample]:
    """Yield the samples from the report of one process.

    Args:
        process: the process.
        pid: the name of the process on the page.
        gpu_by_uuid: the index of each device; other devices get `gpu=""`.
    """
    report = process.report
    process_labels = (pid, report.process.workload, report.process.rank)
    for sample in _distinct(report.devices):
        labels = (gpu_by_uuid.get(sample.uuid, ""), sample.uuid, *process_labels)
        reserved = sample.reserved_bytes
        fragmented = fragmented_bytes(sample)
        for metric, value in (
            (catalog.TORCH_ALLOCATED, sample.allocated_bytes),
            (catalog.TORCH_RESERVED, reserved),
            (catalog.TORCH_ACTIVE, sample.active_bytes),
            (catalog.TORCH_INACTIVE_SPLIT, sample.inactive_split_bytes),
            (catalog.TORCH_REQUESTED, sample.requested_bytes),
            (catalog.TORCH_ALLOCATED_PEAK, sample.allocated_peak_bytes),
            (catalog.TORCH_RESERVED_PEAK, sample.reserved_peak_bytes),
            (catalog.TORCH_PLANNED_RESERVED_PEAK, sample.planned_reserved_peak_bytes),
            (catalog.TORCH_PLAN_ERROR_RATIO, plan_error_ratio(sample, report.step)),
            (catalog.TORCH_RECLAIMABLE, sample.reclaimable_bytes),
            (catalog.TORCH_FRAGMENTED, fragmented),
            (catalog.TORCH_PRIVATE_POOLS, sample.private_pools_bytes),
            (catalog.TORCH_ALLOC_RETRIES, sample.alloc_retries),
            (catalog.TORCH_OOMS, sample.ooms),
            (catalog.TORCH_SEGMENTS_ALLOCATED, sample.segments_allocated),
            (catalog.TORCH_SEGMENTS_FREED, sample.segments_freed),
            (catalog.TORCH_CACHE_FLUSHES, sample.cache_flushes),
            (catalog.TORCH_PEAK_RESETS, sample.peak_resets),
            (catalog.TORCH_STEP, report.step),
        ):
            if value is not None:
                yield metric, labels, value
        if reserved:
            if sample.allocated_bytes is not None:
                yield catalog.TORCH_SLACK_RATIO, labels, (reserved - sample.allocated_bytes) / reserved
            if fragmented is not None:
                yield catalog.TORCH_FRAGMENTATION_RATIO, labels, fragmented / reserved
        for phase, value in sorted(sample.phase_peak_bytes.items()):
            yield catalog.TORCH_PHASE_PEAK, (*labels, phase), value
        for component, value in sorted(sample.component_bytes.items()):
            yield catalog.TORCH_COMPONENT, (*labels, component), value
    if report.pinned_host_bytes is not None:
        yield catalog.TORCH_PINNED_HOST, process_labels, report.pinned_host_bytes


def _distinct(samples: tuple[DeviceSample, ...]) -> tuple[DeviceSample, ...]:
    """Return the first sample of each device."""
    if len({sample.uuid for sample in samples}) == len(samples):
        return samples
    return tuple(reversed({sample.uuid: sample for sample in reversed(samples)}.values()))
