"""The metric of orphans."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from gpumem_exporter.core.readings import LostLauncher, ProcessMemory
from gpumem_exporter.metrics.collector_types import Collector, Metric, Samples, Subject, View, listed

_ORPHAN = Metric(
    "gpumem_process_orphan",
    "gauge",
    "1 for a process whose launcher, server or container has ended and left it behind, and which does not compute any"
    " more; absent for any other. reason is launcher_ended or container_gone.",
    ("gpu", "uuid", "pid", "reason"),
)


def _orphans(view: View) -> Iterator[Subject]:
    """Yield the orphans on each device."""
    if view.snapshot.orphans:  # most nodes have none
        for device in view.devices:
            key = (device.gpu, device.uuid)
            yield Subject(key, _samples, (key, device.processes or (), view.snapshot.orphans))


def _samples(
    device: tuple[str, str], processes: Iterable[ProcessMemory], orphans: Mapping[int, LostLauncher]
) -> Samples:
    found = sorted(orphans.keys() & {process.pid for process in processes})
    return listed((_ORPHAN, (*device, str(pid), orphans[pid].reason), 1) for pid in found)


ORPHANS = Collector("orphans", (_ORPHAN,), _orphans)
