"""What all subjects of a scrape share: the devices in order, and the pid that each process carries on the page.

Prometheus refuses a whole page for one doubled series, so a pid stands for one process here, always:

- The driver's own pids come first. A reporter whose host pid is known carries it. If two do (the pid was used again and
  the first has not yet expired), the one that reported last is shown and the other left out: it can no longer be alive.
- A reporter whose host pid cannot be known carries its own. If that pid is also another's here, of the driver's or of a
  reporter in another PID namespace (in containers, everybody is pid 1), it carries `pid@namespace` instead, and so
  does every other reporter in that position: none of them is lost, and none inherits the series of another.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter

from gpumem_exporter.core.samples import (
    DeviceReading,
    NodeReading,
    ProcessMemory,
    ReportingProcess,
    SilentReporter,
    Snapshot,
)

__all__ = ["View", "gpu_by_uuid", "pid_order"]


@dataclass(frozen=True, slots=True)
class View:
    """A snapshot, put in order: devices by index, processes by pid."""

    snapshot: Snapshot
    node: NodeReading | None
    """The last poll, if it is recent and the driver answered it."""
    devices: tuple[DeviceReading, ...]
    listed: tuple[tuple[ProcessMemory, ...], ...]
    """The processes on each of `devices`, in the same order, by pid, each once; none where the list is not known."""
    gpu_by_uuid: Mapping[str, str]
    reporting: tuple[tuple[str, ReportingProcess], ...]
    """Each with the pid it carries."""
    silent: tuple[tuple[str, SilentReporter], ...]

    @classmethod
    def of(cls, snapshot: Snapshot) -> View:
        """Put a snapshot in order."""
        node = snapshot.node if snapshot.node is not None and snapshot.node.up else None
        devices = _in_order(node.devices) if node is not None else ()
        reporting, silent = _by_pid(snapshot, devices)
        listed = tuple([_listed(device) for device in devices])
        return cls(snapshot, node, devices, listed, gpu_by_uuid(node), reporting, silent)


def gpu_by_uuid(node: NodeReading | None) -> dict[str, str]:
    """The `gpu` label of each device; empty while the driver does not answer."""
    return {} if node is None or not node.up else {device.uuid: device.gpu for device in node.devices}


def pid_order(pid: str) -> tuple[int, int]:
    """Sorts the pids that processes carry here by number, those with a namespace after the plain one."""
    number, _, namespace = pid.partition("@")
    return int(number), int(namespace or -1)


def _listed(device: DeviceReading) -> tuple[ProcessMemory, ...]:
    """By pid; one that the driver lists twice counts once, the first time that its figure is known."""
    distinct: dict[int, ProcessMemory] = {}
    for process in device.processes or ():
        known = distinct.setdefault(process.pid, process)
        if known.used_bytes is None:
            distinct[process.pid] = process
    return tuple(sorted(distinct.values(), key=attrgetter("pid")))


def _in_order(devices: Iterable[DeviceReading]) -> tuple[DeviceReading, ...]:
    distinct: dict[tuple[str, str], DeviceReading] = {}
    for device in devices:
        distinct.setdefault((device.gpu, device.uuid), device)
    return tuple(sorted(distinct.values(), key=_device_order))


def _device_order(device: DeviceReading) -> tuple[tuple[int, ...], str, str]:
    """By number, `0:2` (a MIG device) after `0` and before `1`; what is no number comes first, by its text."""
    parts = device.gpu.split(":")
    numbers = tuple(int(part) for part in parts) if all(part.isdecimal() for part in parts) else ()
    return numbers, device.gpu, device.uuid


def _by_pid(
    snapshot: Snapshot, devices: Iterable[DeviceReading]
) -> tuple[tuple[tuple[str, ReportingProcess], ...], tuple[tuple[str, SilentReporter], ...]]:
    reporters: tuple[ReportingProcess | SilentReporter, ...] = (*snapshot.processes, *snapshot.silent)
    ambiguous = _ambiguous_pids(reporters, devices)
    reporting: dict[str, ReportingProcess] = {}
    for process in snapshot.processes:
        pid = _pid(process, ambiguous)
        other = reporting.get(pid)
        if other is None or process.received_seconds >= other.received_seconds:
            reporting[pid] = process
    silent: dict[str, SilentReporter] = {}
    for reporter in snapshot.silent:
        pid = _pid(reporter, ambiguous)
        last = silent.get(pid)
        if pid not in reporting and (
            last is None or reporter.last_report_unix_seconds >= last.last_report_unix_seconds
        ):
            silent[pid] = reporter
    return tuple(sorted(reporting.items(), key=_item_order)), tuple(sorted(silent.items(), key=_item_order))


def _item_order(item: tuple[str, object]) -> tuple[int, int]:
    return pid_order(item[0])


def _ambiguous_pids(
    reporters: Iterable[ReportingProcess | SilentReporter], devices: Iterable[DeviceReading]
) -> frozenset[int]:
    """The pids that a reporter with no known host pid cannot carry alone."""
    namespaces: dict[int, set[int]] = {}
    hosts: set[int] = set()
    for reporter in reporters:
        if reporter.host_pid is None:
            namespaces.setdefault(reporter.key.pid, set()).add(reporter.key.pid_namespace)
        else:
            hosts.add(reporter.host_pid)
    if not namespaces:
        return frozenset()
    for device in devices:
        hosts.update(listed.pid for listed in device.processes or ())
    return frozenset(pid for pid, seen in namespaces.items() if len(seen) > 1 or pid in hosts)


def _pid(reporter: ReportingProcess | SilentReporter, ambiguous: frozenset[int]) -> str:
    if reporter.host_pid is None and reporter.key.pid in ambiguous:
        return f"{reporter.key.pid}@{reporter.key.pid_namespace}"
    return reporter.label_pid
