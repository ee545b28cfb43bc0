"""Builders for snapshots of a node and their metrics page."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from prometheus_client import Metric

from gpumem_client.wire.protocol import DeviceSample, ProcessIdentity, Report
from gpumem_exporter.collectors.exposition import Exposition
from gpumem_exporter.collectors.instruments import Instruments
from gpumem_exporter.core.samples import (
    DeviceMemory,
    DeviceReading,
    NodeReading,
    ProcessFacts,
    ProcessKey,
    ProcessMemory,
    ReportingProcess,
    SilentReporter,
    Snapshot,
)

MIB = 2**20
UUID = "GPU-0"
SAMPLE = DeviceSample(UUID, allocated_bytes=60, reserved_bytes=100, reclaimable_bytes=30, ooms=2)
Read = dict[tuple[str, frozenset[tuple[str, str]]], float]


def exposition(instruments: Instruments | None = None) -> Exposition:
    """Return an exposition with a constant clock."""
    return Exposition(instruments or Instruments(), version="1", source="nvml", clock=lambda: 0.0)


def text_of(writer: Exposition, snapshot: Snapshot, *, openmetrics: bool = False) -> str:
    """Return a page without the exporter's process, so that two pages of one snapshot are equal."""
    page = b"".join(writer.render(snapshot, openmetrics=openmetrics)).decode()
    return re.sub(r"^(# \w+ )?process_.*\n", "", page, flags=re.MULTILINE)


def page(snapshot: Snapshot) -> list[str]:
    return text_of(exposition(), snapshot).splitlines()


def lines(snapshot: Snapshot, *starts: str) -> list[str]:
    """Return the lines of the families with these names."""
    return [line for line in page(snapshot) if line.startswith(tuple(f"{start}{{" for start in starts))]


def node(*devices: DeviceReading, facts: Mapping[int, ProcessFacts] | None = None, up: bool = True) -> NodeReading:
    return NodeReading(
        taken_seconds=9.0,
        taken_unix_seconds=1e9,
        duration_seconds=0.5,
        up=up,
        driver_version="570.1",
        devices=devices,
        facts=facts or {},
    )


def device(gpu: str = "0", uuid: str = UUID, processes: Mapping[int, int | None] | None = None) -> DeviceReading:
    return DeviceReading(
        gpu=gpu,
        uuid=uuid,
        memory=DeviceMemory(1000 * MIB, 500 * MIB, 490 * MIB, 10 * MIB),
        processes=tuple(ProcessMemory(pid, used) for pid, used in (processes or {}).items()),
    )


def process(
    pid: int = 7,
    *samples: DeviceSample,
    host_pid: int | None = 70,
    namespace: int = 1,
    received: float = 5.0,
    workload: str = "w",
    rank: str = "0",
    start_time_ticks: int = 3,
    pinned: int | None = None,
    step: int | None = None,
) -> ReportingProcess:
    identity = ProcessIdentity(
        pid, start_time_ticks, namespace, "s", 0.0, workload, rank, command="python own.py", torch_version="2.15"
    )
    report = Report(identity, sequence=1, devices=samples, pinned_host_bytes=pinned, step=step)
    return ReportingProcess(ProcessKey(namespace, pid), host_pid, report, received, 1e9 + received)


def silent(pid: int, *, host_pid: int | None = 70, workload: str = "w") -> SilentReporter:
    return SilentReporter(ProcessKey(1, pid), host_pid, 3, workload, "0", 1e9)


def snapshot(
    *processes: ReportingProcess, on: NodeReading | None = None, quiet: tuple[SilentReporter, ...] = ()
) -> Snapshot:
    return Snapshot(10.0, on, processes, quiet)


def read(families: Iterable[Metric]) -> tuple[dict[str, tuple[str, str]], Read]:
    """Return type and help of each family, and each sample; a duplicate sample fails."""
    kinds: dict[str, tuple[str, str]] = {}
    samples: Read = {}
    for family in families:
        kinds[family.name] = (family.type, family.documentation)
        for sample in family.samples:
            identity = (sample.name, frozenset(sample.labels.items()))
            assert identity not in samples, f"doubled: {identity}"
            samples[identity] = float(sample.value)
    return kinds, samples
