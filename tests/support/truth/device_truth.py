"""The expected series of a device, from the books of the node and the processes' statistics, and the scraped ones."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import Any

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import DeviceBook, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.exporter_process import ExporterProcess, Metrics
from tests.support.waiting import wait_for

ATTACH_SECONDS = 60.0
"""Longer than the longest delay between two attempts to attach."""
FOREIGN_PID = 4_000_001
"""The pid of a process without a reporter, above every real pid."""

Truth = Mapping[str, Any]


def start_reporting(
    start_torch: StartTorch, exporter: ExporterProcess, devices: Iterable[int] = (0,), **options: Any
) -> TorchProcess:
    """Return a process that reports, with a heap on each of these devices."""
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, **options)
    process.call("start_client")
    for device in devices:
        process.call("random_heap", device=device, seed=device, blocks=60, largest_bytes=16 << 20)
    exporter.wait_for_processes(process.pid)
    return process


def truth(book: DeviceBook, stats: Mapping[int, Mapping[str, int]]) -> Truth:
    """Return the expected values of one device with classic segments.

    `stats` has `memory_stats` of each reporting process on the device, by pid.
    """
    ledger = dict.fromkeys(("torch_allocated", "torch_reclaimable", "torch_fragmented", "non_torch"), 0)
    for pid, own in stats.items():
        reserved, allocated = own["reserved_bytes.all.current"], own["allocated_bytes.all.current"]
        reclaimable = reserved - own["active_bytes.all.current"] - own["inactive_split_bytes.all.current"]
        ledger["torch_allocated"] += allocated
        ledger["torch_reclaimable"] += reclaimable
        ledger["torch_fragmented"] += reserved - allocated - reclaimable
        ledger["non_torch"] += book.processes[pid] - reserved
    ledger["other_processes"] = sum(used for pid, used in book.processes.items() if pid not in stats)
    ledger["driver_reserved"] = book.reserved_bytes
    ledger["unattributed"] = book.unattributed_bytes
    ledger["free"] = book.free_bytes
    return {
        "ledger": ledger,
        "total": [book.total_bytes],
        "used": [book.used_bytes],
        "free": [book.free_bytes],
        "reserved": [book.reserved_bytes],
        "processes": {str(pid): used for pid, used in book.processes.items()},
        "allocated": {str(pid): own["allocated_bytes.all.current"] for pid, own in stats.items()},
    }


def shown(metrics: Metrics, uuid: str) -> Truth:
    """Return the same values from one scrape."""
    memory = {
        name: metrics.values(f"gpumem_device_memory_{name}_bytes", uuid=uuid)
        for name in ("total", "used", "free", "reserved")
    }
    return {
        "ledger": metrics.ledgers().get(uuid, {}),
        **memory,
        "processes": metrics.by("pid", "gpumem_process_memory_used_bytes", uuid=uuid),
        "allocated": metrics.by("pid", "gpumem_torch_allocated_bytes", uuid=uuid),
    }


def scrape(exporter: ExporterProcess) -> Metrics:
    """Scrape, and assert that ledgers add up and that device indexes are unique."""
    metrics = exporter.metrics()
    metrics.assert_ledgers_add_up()
    gpus = [dict(labels)["gpu"] for labels in metrics.samples.get("gpumem_device_up", {})]
    assert len(gpus) == len(set(gpus)), gpus
    return metrics


def wait_until_right(
    exporter: ExporterProcess,
    node: EmulatedNode,
    devices: Iterable[int],
    reporting: Mapping[int, Iterable[TorchProcess]],
    *,
    all_visible: bool = False,
) -> Metrics:
    """Wait for a scrape in which each of these devices has the expected values.

    `reporting` has the processes of each index. Unless they see all devices, the index is their device 0.
    """
    books = node.books()
    wanted = {
        node.uuid(device): truth(
            books[device],
            {
                process.pid: process.call("stats", device=device if all_visible else 0)
                for process in reporting.get(device, ())
                if process.pid in books[device].processes
            },
        )
        for device in devices
    }

    def right() -> Metrics | None:
        metrics = scrape(exporter)
        return metrics if all(shown(metrics, uuid) == whole for uuid, whole in wanted.items()) else None

    with contextlib.suppress(AssertionError):
        return wait_for(right, "the expected values of the devices", ATTACH_SECONDS)
    metrics = scrape(exporter)
    assert {uuid: shown(metrics, uuid) for uuid in wanted} == wanted
    return metrics


def series_of(metrics: Metrics, **labels: str) -> list[str]:
    """Return the names of all series with these labels."""
    wanted = set(labels.items())
    return [name for name, samples in metrics.samples.items() if any(wanted <= found for found in samples)]
