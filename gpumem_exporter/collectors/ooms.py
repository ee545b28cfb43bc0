"""Samples of the out-of-memory errors of the last hour, also of processes that have exited."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Sample
from gpumem_exporter.collectors.view import View, pid_order

__all__ = ["oom_samples"]

_VALUES = tuple(
    (metric, attrgetter(name))
    for metric, name in (
        (catalog.LAST_OOM_TIMESTAMP, "happened_unix_seconds"),
        (catalog.LAST_OOM_REQUESTED, "requested_bytes"),
        (catalog.LAST_OOM_DEVICE_FREE, "device_free_bytes"),
        (catalog.LAST_OOM_LIMIT, "limit_bytes"),
        (catalog.LAST_OOM_ALLOCATED, "allocated_bytes"),
        (catalog.LAST_OOM_RESERVED, "reserved_bytes"),
        (catalog.LAST_OOM_RECLAIMABLE, "reclaimable_bytes"),
        (catalog.LAST_OOM_FRAGMENTED, "fragmented_bytes"),
    )
)


def oom_samples(view: View) -> Iterator[Sample]:
    """Yield the last error of each process on each device, with the labels at the time of the error.

    If the index of the device was unknown then, because the driver had not been polled, the current index is used.
    """
    for oom in sorted(view.snapshot.ooms, key=lambda oom: (pid_order(oom.pid), oom.uuid)):
        labels = (oom.gpu or view.gpu_by_uuid.get(oom.uuid, ""), oom.uuid, oom.pid, oom.workload, oom.rank)
        for metric, get_value in _VALUES:
            value = get_value(oom)
            if value is not None:
                yield metric, labels, value
