"""Finds the processes of a target in a snapshot. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.actions.request import Target
from gpumem_exporter.core.naming import Names, json_pid
from gpumem_exporter.core.samples import ReportingProcess, Snapshot

__all__ = [
    "ListedProcess",
    "SelectedProcess",
    "gpu_labels",
    "listed_pids",
    "select_listed",
    "select_reporting",
    "user_names",
    "users_of",
]


class SelectedProcess(NamedTuple):
    """A reporting process that a target selects."""

    pid: int | str
    """Its name, as in `core.naming`."""
    process: ReportingProcess
    samples: tuple[DeviceSample, ...]
    """Its samples of the selected devices."""

    def __str__(self) -> str:
        rank = self.process.report.process.rank
        return f"pid {self.pid}" + (f" (rank {rank})" if rank else "")


@dataclass(frozen=True, slots=True)
class ListedProcess:
    """A process that the driver lists on a device and that does not report."""

    pid: int
    """In the host's PID namespace."""
    start_time_ticks: int
    """0 if unknown."""
    used_bytes: tuple[tuple[str, int | None], ...]
    """The driver's value for each selected device, by uuid."""


def select_reporting(target: Target, snapshot: Snapshot) -> Iterator[SelectedProcess]:
    """Yield the reporting processes of a target. A target with a device excludes processes that do not use it."""
    gpus = gpu_labels(snapshot)
    by_device = bool(target.uuid or target.gpu)
    for name, process in Names.of(snapshot).reporting:
        identity = process.report.process
        if not (
            target.admits("pid", name)
            and target.admits("workload", identity.workload)
            and target.admits("rank", identity.rank)
            and target.admits("user", *users_of(process, snapshot))
        ):
            continue
        samples = process.report.devices
        if by_device:
            samples = tuple(
                sample
                for sample in samples
                if target.admits("uuid", sample.uuid) and target.admits("gpu", gpus.get(sample.uuid, ""))
            )
        if samples or not by_device:
            yield SelectedProcess(json_pid(name), process, samples)


def select_listed(target: Target, snapshot: Snapshot) -> Iterator[ListedProcess]:
    """Yield the target's processes that the driver lists and that do not report."""
    node = snapshot.node
    if node is None or target.workload or target.rank:
        return
    unreported = listed_pids(snapshot)
    found: dict[int, list[tuple[str, int | None]]] = {}
    for device in node.devices:
        if target.admits("uuid", device.uuid) and target.admits("gpu", device.gpu):
            for listed in device.processes or ():
                if (
                    listed.pid in unreported
                    and target.admits("pid", str(listed.pid))
                    and target.admits("user", *user_names(listed.pid, snapshot))
                ):
                    found.setdefault(listed.pid, []).append((device.uuid, listed.used_bytes))
    for pid in sorted(found):
        facts = node.facts.get(pid)
        yield ListedProcess(pid, facts.start_time_ticks if facts is not None else 0, tuple(found[pid]))


def listed_pids(snapshot: Snapshot) -> frozenset[int]:
    """Return the pids that the driver lists and that do not report."""
    node = snapshot.node
    devices = node.devices if node is not None and node.up else ()
    listed = {listed.pid for device in devices for listed in device.processes or ()}
    return frozenset(listed - {process.host_pid for process in snapshot.processes})


def users_of(process: ReportingProcess, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the name and the uid of a process's user, as far as they are known."""
    names = () if process.host_pid is None else user_names(process.host_pid, snapshot)
    return names if process.owner_uid is None else (*names, str(process.owner_uid))


def user_names(host_pid: int, snapshot: Snapshot) -> tuple[str, ...]:
    """Return the name of the user of a process of the host, if it is known."""
    facts = snapshot.node.facts.get(host_pid) if snapshot.node is not None else None
    return (facts.user,) if facts is not None and facts.user else ()


def gpu_labels(snapshot: Snapshot) -> dict[str, str]:
    """Return the NVML index of each device by uuid."""
    return {} if snapshot.node is None else {device.uuid: device.gpu for device in snapshot.node.devices}
