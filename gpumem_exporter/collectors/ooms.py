"""Samples of the out-of-memory errors of the last hour, also of processes that have exited."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from gpumem_exporter.collectors import catalog
from gpumem_exporter.collectors.subjects import Collector, Samples, Series, Subject
from gpumem_exporter.collectors.view import View
from gpumem_exporter.core.naming import pid_order

__all__ = ["OOM"]

_VALUES = {
    catalog.LAST_OOM_TIMESTAMP: attrgetter("happened_unix_seconds"),
    catalog.LAST_OOM_REQUESTED: attrgetter("requested_bytes"),
    catalog.LAST_OOM_DEVICE_FREE: attrgetter("device_free_bytes"),
    catalog.LAST_OOM_LIMIT: attrgetter("limit_bytes"),
    catalog.LAST_OOM_ALLOCATED: attrgetter("allocated_bytes"),
    catalog.LAST_OOM_RESERVED: attrgetter("reserved_bytes"),
    catalog.LAST_OOM_RECLAIMABLE: attrgetter("reclaimable_bytes"),
    catalog.LAST_OOM_FRAGMENTED: attrgetter("fragmented_bytes"),
}


def _ooms(view: View) -> Iterator[Subject]:
    """Yield the last error of each process on each device, with the labels at the time of the error.

    If the index of the device was unknown then, because the driver had not been polled, the current index is used.
    """
    for oom in sorted(view.snapshot.ooms, key=lambda oom: (pid_order(oom.pid), oom.uuid)):
        gpu = oom.gpu or view.gpu_by_uuid.get(oom.uuid, "")
        values = tuple([get_value(oom) for get_value in _VALUES.values()])
        yield (oom.uuid, oom.pid), Samples((gpu, oom.uuid, oom.pid, oom.workload, oom.rank), _oom_series, values)


def _oom_series(*labels: str) -> Iterator[Series]:
    for metric in _VALUES:
        yield metric, labels


OOM = Collector("oom", tuple(_VALUES), _ooms)
