"""What a scrape costs: the exporter's own writer against `prometheus_client` on the same series, side by side.

    python -m benchmarks.exposition [--rounds N]

Ratios hold from machine to machine; milliseconds are this machine's. `scrape` is what a scrape costs when the reports
were prepared as they came in, with fresh reports and a fresh reading of the driver before each; then the same page
with nothing prepared, the same series by `prometheus_client.generate_latest` over `GpumemCollector`, and, as the least
that any page can cost, one copy of the finished body.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from gpumem_exporter.collectors.collector import GpumemCollector
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
    Snapshot,
)
from gpumem_exporter.protocol import DeviceSample, ProcessIdentity, Report

GIB = 2**30
PHASES = (
    "forward",
    "backward",
    "optimizer",
    "data",
    "eval",
    "checkpoint",
    "logging",
    "sampling",
    "compile",
    "allreduce",
    "warmup",
    "other",
)
SCRAPE = "scrape"
PAGES = (SCRAPE, "scrape in OpenMetrics", "scrape, nothing prepared", "prometheus_client", "one copy of the body")
COMPONENTS = ("parameters", "gradients", "optimizer_state", "other")


def node(processes: int, devices: int, tick: int) -> NodeReading:
    """One reading of the driver: every process is on every device."""
    return NodeReading(
        taken_seconds=float(tick),
        taken_unix_seconds=1.7e9 + tick,
        duration_seconds=0.0123,
        up=True,
        driver_version="570.86.15",
        devices=tuple(
            DeviceReading(
                gpu=str(index),
                uuid=uuid(index),
                name="NVIDIA H100 80GB HBM3",
                pci_bus_id=f"00000000:{index:02X}:00.0",
                memory=DeviceMemory(80 * GIB, 60 * GIB + tick, 19 * GIB - tick, GIB),
                processes=tuple(ProcessMemory(10_000 + pid, GIB // 2 + tick + pid) for pid in range(processes)),
                utilization_ratio=0.97,
            )
            for index in range(devices)
        ),
        facts={10_000 + pid: ProcessFacts(10_000 + pid, 5, "python train.py", "alice") for pid in range(processes)},
    )


def uuid(index: int) -> str:
    """As NVML spells it."""
    return f"GPU-8f6d3c1a-52b7-4e0f-9d1c-{index:012x}"


def reporting(pid: int, devices: int, tick: int) -> ReportingProcess:
    """One process' report; no figure is the same at the next tick."""
    identity = ProcessIdentity(
        pid=pid,
        start_time_ticks=5,
        pid_namespace=4026531836,
        session=f"{pid}",
        session_started_seconds=0.0,
        workload="llm-pretrain",
        rank=str(pid),
        command="python train.py",
        torch_version="2.15.0+cu132",
    )
    base = GIB // 4 + 4096 * tick + pid
    samples = tuple(
        DeviceSample(
            uuid=uuid(index),
            allocated_bytes=base + index,
            reserved_bytes=base + 900_000,
            active_bytes=base + index,
            inactive_split_bytes=70_000 + tick,
            requested_bytes=base - 5000,
            allocated_peak_bytes=base + 500_000,
            reserved_peak_bytes=base + 900_000,
            private_pools_bytes=2048 + tick,
            reclaimable_bytes=700_000 + tick,
            alloc_retries=tick,
            ooms=tick // 2,
            segments_allocated=500 + tick,
            segments_freed=300 + tick,
            cache_flushes=12 + tick,
            phase_peak_bytes={phase: base + place for place, phase in enumerate(PHASES)},
            component_bytes={component: base // 4 + place for place, component in enumerate(COMPONENTS)},
        )
        for index in range(devices)
    )
    report = Report(identity, sequence=tick, devices=samples, pinned_host_bytes=10**6 + tick, step=tick)
    return ReportingProcess(ProcessKey(4026531836, pid), 10_000 + pid, report, float(tick), 1.7e9 + tick)


def measure(processes: int, devices: int, rounds: int) -> None:
    """Print one node's figures."""
    registry = CollectorRegistry()
    Instruments(registry).count_report("accepted")
    exposition = Exposition(registry, version="0", source="nvml")
    seconds: dict[str, list[float]] = {name: [] for name in (*PAGES, "prepare", "prepare, a reading")}
    body = b""
    for tick in range(1, rounds + 1):
        reading = node(processes, devices, tick)
        reports = tuple(reporting(pid, devices, tick) for pid in range(processes))
        snapshot = Snapshot(float(tick), reading, reports)
        for report in reports:
            seconds["prepare"].append(timed(exposition.prepare, report, reading)[0])
        seconds["prepare, a reading"].append(timed(exposition.prepare_reading, reading)[0])
        render = partial(exposition.render, snapshot)
        spent, body = timed(render, openmetrics=False)
        seconds[SCRAPE].append(spent)
        seconds["scrape in OpenMetrics"].append(timed(render, openmetrics=True)[0])
        cold = Exposition(registry, version="0", source="nvml")
        seconds["scrape, nothing prepared"].append(timed(cold.render, snapshot, openmetrics=False)[0])
        seconds["one copy of the body"].append(timed(bytearray, body)[0])
        if tick <= max(3, rounds // 10):
            embedded = CollectorRegistry()
            embedded.register(GpumemCollector(partial(same, snapshot), version="0", source="nvml"))
            seconds["prometheus_client"].append(timed(generate_latest, embedded)[0])
    series = sum(not line.startswith(b"#") for line in body.splitlines())
    base = statistics.median(seconds[SCRAPE])
    print(f"{processes} processes x {devices} devices: {series} series, {len(body) / 1e6:.2f} MB")
    for name in PAGES:
        median = statistics.median(seconds[name])
        print(f"  {name:26}{1e3 * median:9.3f} ms{1e6 * median / series:9.3f} us/series{median / base:9.2f} x scrape")
    print(f"  {'prepare, each reading':26}{1e3 * statistics.median(seconds['prepare, a reading']):9.3f} ms")
    print(f"  {'prepare, each report':26}{1e3 * statistics.median(seconds['prepare']):9.3f} ms")


def timed(work: Callable[..., Any], *arguments: object, **options: object) -> tuple[float, Any]:
    """How long it took, and what it returned."""
    begun = time.perf_counter()
    result = work(*arguments, **options)
    return time.perf_counter() - begun, result


def same(snapshot: Snapshot) -> Snapshot:
    """A node on which nothing moves."""
    return snapshot


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=50, help="pages written per figure (default: %(default)s)")
    rounds = parser.parse_args().rounds
    measure(64, 1, rounds)
    measure(64, 8, rounds)


if __name__ == "__main__":
    main()
