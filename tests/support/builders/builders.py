"""Builders for the exporter's data classes, with defaults for values that a test does not need."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpumem_client.wire.protocol import DeviceSample, ProcessIdentity, Report
from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.core.container import HERE, Place
from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, NodeReading, ProcessFacts, ProcessMemory
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess
from gpumem_exporter.edge.connections import Connection, Exchange, Limits
from gpumem_exporter.edge.peer import Peer

MIB = 1 << 20
UNLIMITED = RateLimits(per_caller=10**9, per_process=10**9, clock=lambda: 0.0)
UUIDS = tuple(f"GPU-0000000{i}-0000-0000-0000-000000000000" for i in range(8))


def identity(pid: int, **changes: Any) -> ProcessIdentity:
    base = ProcessIdentity(
        pid=pid, start_time_ticks=1000, pid_namespace=1, session="first", session_started_seconds=1.0, workload="train"
    )
    return dataclasses.replace(base, **changes)


def sample(uuid: str = UUIDS[0], allocated: int = 0, reclaimable: int = 0, fragmented: int = 0) -> DeviceSample:
    return DeviceSample(
        uuid=uuid,
        allocated_bytes=allocated,
        reserved_bytes=allocated + reclaimable + fragmented,
        active_bytes=allocated,
        inactive_split_bytes=fragmented,
        reclaimable_bytes=reclaimable,
    )


def report(pid: int = 100, *, devices: tuple[DeviceSample, ...] = (), sequence: int = 1, **changes: Any) -> Report:
    names = {field.name for field in dataclasses.fields(Report)}
    of_report = {name: value for name, value in changes.items() if name in names}
    of_process = {name: value for name, value in changes.items() if name not in names}
    return Report(process=identity(pid, **of_process), sequence=sequence, devices=devices, **of_report)


def reporting(
    pid: int = 100, *, host_pid: int | None = -1, owner_uid: int | None = None, **changes: Any
) -> ReportingProcess:
    """Return a reporting process; its host pid is `pid` by default."""
    sent = report(pid, **changes)
    return ReportingProcess(
        key=ProcessKey(sent.process.pid_namespace, pid, owner_uid),
        host_pid=pid if host_pid == -1 else host_pid,
        report=sent,
        received_seconds=0.0,
        received_unix_seconds=0.0,
    )


def device(
    uuid: str = UUIDS[0],
    *,
    gpu: str = "0",
    total: int = 80 * 1024 * MIB,
    used: int = 0,
    reserved: int | None = 0,
    processes: dict[int, int | None] | None = None,
) -> DeviceReading:
    """Return a device reading; `processes` maps pid to bytes, None is a list that cannot be read."""
    return DeviceReading(
        gpu=gpu,
        uuid=uuid,
        memory=DeviceMemory(total, used, total - used - (reserved or 0), reserved),
        processes=None if processes is None else tuple(ProcessMemory(pid, size) for pid, size in processes.items()),
    )


def node(*devices: DeviceReading, taken: float = 0.0, up: bool = True) -> NodeReading:
    return NodeReading(
        taken_seconds=taken, taken_unix_seconds=taken, duration_seconds=0.001, up=up, devices=tuple(devices)
    )


@dataclasses.dataclass
class Clock:
    """A clock that advances when it sleeps, or manually."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def state_from(peer: Peer) -> dict[str, Any]:
    """Return the `state` of the ASGI scope of a request of this peer that has passed the edge."""
    return {"exchange": Exchange(Connection(peer, Limits(8)), peer)}


class NobodyHost:
    """A host without processes."""

    def facts(self, pid: int) -> ProcessFacts | None:
        return None

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        return None

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:
        return None

    def place(self, host_pid: int) -> Place:
        return HERE

    def slurm_job(self, pid: int | None) -> str | None:
        return None

    def program(self, host_pid: int) -> int | None:
        return None

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        return False
