"""The metrics of the last out-of-memory error of each process on each device."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter

from gpumem_exporter.core.naming import pid_order
from gpumem_exporter.metrics.collector_types import Collector, Metric, Subject, View, listed


def _gauge(name: str, help: str) -> Metric:  # noqa: A002 - the field's name
    return Metric(name, "gauge", help, ("gpu", "uuid", "pid", "workload", "rank"))


_VALUES = {
    _gauge(
        "gpumem_last_oom_timestamp_seconds",
        "Time of the process' last out-of-memory error on the device, including caught errors, in seconds since the"
        " epoch. Present for an hour, also if the process exited; gpu and pid are those at the time of the error. At"
        " most 256 errors are shown, the newest ones.",
    ): "happened_unix_seconds",
    _gauge(
        "gpumem_last_oom_requested_bytes",
        "Bytes that the allocator requested from the driver at the process' last out-of-memory error: the program's"
        " request, rounded up to a segment.",
    ): "requested_bytes",
    _gauge(
        "gpumem_last_oom_device_free_bytes",
        "Free bytes of the device according to the driver at the process' last out-of-memory error.",
    ): "device_free_bytes",
    _gauge(
        "gpumem_last_oom_limit_bytes",
        "The most bytes that the process could have at its last out-of-memory error: the memory of the device, or the"
        " process' memory fraction of it.",
    ): "limit_bytes",
    _gauge(
        "gpumem_last_oom_allocated_bytes",
        "gpumem_torch_allocated_bytes at the process' last out-of-memory error.",
    ): "allocated_bytes",
    _gauge(
        "gpumem_last_oom_reserved_bytes",
        "gpumem_torch_reserved_bytes at the process' last out-of-memory error, after the allocator had flushed its"
        " cache.",
    ): "reserved_bytes",
    _gauge(
        "gpumem_last_oom_reclaimable_bytes",
        "gpumem_torch_reclaimable_bytes at the process' last out-of-memory error, after the allocator had flushed its"
        " cache. Absent if unknown.",
    ): "reclaimable_bytes",
    _gauge(
        "gpumem_last_oom_fragmented_bytes",
        "gpumem_torch_fragmented_bytes at the process' last out-of-memory error. If these and the device's free bytes"
        " together exceed the request, fragmentation is the reason that it failed. Absent if reclaimable is absent.",
    ): "fragmented_bytes",
}
"""Each metric, and its field of `LastOom`."""
_values = attrgetter(*_VALUES.values())


def _ooms(view: View) -> Iterator[Subject]:
    """Yield the last error of each process on each device, with the labels at the time of the error."""
    # If the driver had not been polled then, the index of the device was unknown: the current one is used.
    for oom in sorted(view.snapshot.ooms, key=lambda oom: (pid_order(oom.pid), oom.uuid)):
        labels = (oom.gpu or view.gpu_by_uuid.get(oom.uuid, ""), oom.uuid, oom.pid, oom.workload, oom.rank)
        samples = [(metric, labels, value) for metric, value in zip(_VALUES, _values(oom), strict=True)]
        yield Subject((oom.uuid, oom.pid), listed, (samples,))


OOM = Collector("ooms", tuple(_VALUES), _ooms)
