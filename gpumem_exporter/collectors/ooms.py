"""Series of the out-of-memory errors of the last hour: what happened, whether or not its process is still there."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.lines import Sample
from gpumem_exporter.collectors.view import View, pid_order

__all__ = ["oom_samples"]

_FIGURES = tuple(
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
    """The last error of each process on each device. Its names are those that the process and the device had then.

    A device whose index was not known then, since nobody had asked the driver yet, has the one that it has now.
    """
    for oom in sorted(view.snapshot.ooms, key=lambda oom: (pid_order(oom.pid), oom.uuid)):
        labels = (oom.gpu or view.gpu_by_uuid.get(oom.uuid, ""), oom.uuid, oom.pid, oom.workload, oom.rank)
        for metric, figure in _FIGURES:
            value = figure(oom)
            if value is not None:
                yield metric, labels, value
