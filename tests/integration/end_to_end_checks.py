"""What must hold between a PyTorch process, the exporter and the driver, on any device, real or emulated.

Each check takes what it works with: the exporter, processes that are started and do not report yet, and `books`, which
reads the driver's own figures past the exporter. `devices` are torch's indices in those processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests.emulation.node import DeviceBook
from tests.emulation.torch_process import TorchProcess
from tests.exporter_process import ExporterProcess, Metrics, wait_until_equal

__all__ = [
    "QUICK",
    "UNLIMITED",
    "Books",
    "check_a_garbage_collection_frees_tensors_in_cycles",
    "check_a_private_pool_stays_and_the_rest_is_reclaimable",
    "check_every_torch_series_is_what_the_process_says",
    "check_ledgers_add_up_in_every_scrape",
    "check_peaks_are_reset_on_the_device_meant_alone",
    "check_reclaimable_is_what_a_clear_gives_back",
    "check_reclaimable_on_expandable_segments",
]

UNLIMITED = ("--action.caller-limit", "1000000", "--action.process-limit", "1000000")
"""Whoever tests asks for more than anybody else."""
QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2", *UNLIMITED)

Books = Callable[[], Sequence[DeviceBook]]

MIB = 1 << 20
COMPARED = {
    "gpumem_torch_allocated_bytes": "allocated_bytes.all.current",
    "gpumem_torch_reserved_bytes": "reserved_bytes.all.current",
    "gpumem_torch_active_bytes": "active_bytes.all.current",
    "gpumem_torch_inactive_split_bytes": "inactive_split_bytes.all.current",
    "gpumem_torch_requested_bytes": "requested_bytes.all.current",
    "gpumem_torch_allocated_peak_bytes": "allocated_bytes.all.peak",
    "gpumem_torch_reserved_peak_bytes": "reserved_bytes.all.peak",
    "gpumem_torch_alloc_retries_total": "num_alloc_retries",
    "gpumem_torch_ooms_total": "num_ooms",
    "gpumem_torch_segments_allocated_total": "segment.all.allocated",
    "gpumem_torch_segments_freed_total": "segment.all.freed",
    "gpumem_torch_cache_flushes_total": "num_sync_all_streams",
}
"""Series, and the key of `torch.cuda.memory_stats` that it must equal."""

PAGE_BYTES = {"small": 2 * MIB, "large": 20 * MIB}
"""What an expandable segment of each pool grows by and gives back."""


def check_every_torch_series_is_what_the_process_says(
    exporter: ExporterProcess, process: TorchProcess, books: Books, devices: Sequence[int]
) -> None:
    """Every gauge and counter equals `torch.cuda.memory_stats` in the process, byte for byte.

    Where the driver lists the process under a pid that is known here, its figure is compared as well.
    """
    process.call("start_client", workload="bytes", rank=3)
    for device in devices:
        process.call("random_heap", device=device, seed=device, blocks=200)
    process.exec(
        # an OOM that the program catches, after a retry that flushed the cache
        "try:\n    torch.empty(1 << 40, dtype=torch.uint8, device='cuda:0')\nexcept torch.OutOfMemoryError: pass"
    )
    stats = {device: process.call("stats", device=device) for device in devices}
    assert stats[0]["num_ooms"] == stats[0]["num_alloc_retries"] == 1
    uuids = process.call("uuids")
    _wait_for_values(exporter, "gpumem_torch_ooms_total", [1], pid=str(process.pid), uuid=uuids[0])
    for device in devices:
        book = _book(books, uuids[device])
        used = book.processes.get(process.pid)
        labels = {"gpu": str(book.index), "uuid": book.uuid, "pid": str(process.pid)}
        if used is not None:
            _wait_for_values(exporter, "gpumem_process_memory_used_bytes", [used], **labels)
        metrics = exporter.metrics()
        labels |= {"workload": "bytes", "rank": "3"}
        told = {name: metrics.value(name, **labels) for name in COMPARED}
        assert told == {name: stats[device][key] for name, key in COMPARED.items()}
        reserved, allocated = (stats[device][f"{name}_bytes.all.current"] for name in ("reserved", "allocated"))
        non_torch = [] if used is None else [used - reserved]
        assert metrics.values("gpumem_torch_non_torch_bytes", **labels) == non_torch
        assert metrics.value("gpumem_torch_slack_ratio", **labels) == (reserved - allocated) / reserved
    info = exporter.metrics().samples["gpumem_process_info"]
    (labels,) = [dict(found) for found in info if dict(found)["pid"] == str(process.pid)]
    assert labels["reporting"] == "true"
    assert labels["command"].endswith("torch_worker")
    assert labels["torch_version"].startswith("2.")


def check_ledgers_add_up_in_every_scrape(
    exporter: ExporterProcess,
    processes: Sequence[TorchProcess],
    books: Books,
    devices: Sequence[int],
    *,
    scrapes: int = 200,
) -> None:
    """The categories of every device add up to its total while the processes allocate and free at random."""
    for number, process in enumerate(processes):
        process.call("start_client", workload=f"churn-{number % 3}")
        chosen = [devices[(number + further) % len(devices)] for further in range(2)]
        process.call("start_churn", devices=chosen, seed=number)
    exporter.wait_for_processes(*(process.pid for process in processes))
    uuids = {book.uuid for book in books()}
    seen = set()
    for _ in range(scrapes):
        metrics = exporter.metrics()
        metrics.assert_ledgers_add_up()
        assert metrics.ledgers().keys() == uuids
        seen.add(str(metrics.ledgers()))
    assert len(seen) > 10, "nothing moved: this was no test"


def check_reclaimable_is_what_a_clear_gives_back(
    exporter: ExporterProcess, process: TorchProcess, books: Books, *, heaps: int = 50
) -> None:
    """On classic segments one figure, to the byte: what is reclaimable, what a dry run says, what a clear answers, what
    reserved falls by, and what the driver gets back, by its own word and by CUDA's.
    """
    process.call("start_client")
    process.call("random_heap", device=0, seed=99)
    exporter.wait_for_processes(process.pid)
    uuid = process.call("uuids")[0]
    gave_something_back = 0
    for seed in range(heaps):
        process.call("free")
        process.call("random_heap", device=0, seed=seed, blocks=40, keep=(seed % 10) / 10)
        stats = process.call("stats", device=0)
        reclaimable = _wait_for_heap(exporter, process, stats).value(
            "gpumem_torch_reclaimable_bytes", uuid=uuid, pid=str(process.pid)
        )
        target = {"pid": process.pid, "uuid": uuid}
        dry = exporter.act("empty_cache", target=target, dry_run=True)
        before = _book(books, uuid)
        action = exporter.act("empty_cache", target=target)
        after = _book(books, uuid)
        (row,) = action["results"]
        assert (action["state"], row["outcome"]) == ("done", "done")
        reserved_after = process.call("stats", device=0)["reserved_bytes.all.current"]
        freed = {
            "reclaimable": reclaimable,
            "dry run": dry["freed_bytes"],
            "action": action["freed_bytes"],
            "reserved, as measured around it": row["reserved_before_bytes"] - row["reserved_after_bytes"],
            "reserved, as the process says": stats["reserved_bytes.all.current"] - reserved_after,
            "used, as the driver says": before.used_bytes - after.used_bytes,
            "free, as CUDA says": row["device_free_after_bytes"] - row["device_free_before_bytes"],
        }
        assert freed == dict.fromkeys(freed, row["freed_bytes"]), f"heap {seed}"
        gave_something_back += row["freed_bytes"] > 0
    assert gave_something_back > 0.8 * heaps


def check_a_garbage_collection_frees_tensors_in_cycles(exporter: ExporterProcess, process: TorchProcess) -> None:
    """Tensors in cycles stay through a clear, go with a collection, and the clear after it gives them back."""
    process.call("start_client")
    process.exec(
        "import gc; gc.disable()\n"
        "for _ in range(4):\n"
        "    knot = [torch.empty(50 << 20, dtype=torch.uint8, device='cuda')]\n"
        "    knot.append(knot)\n"
        "del knot"
    )
    exporter.wait_for_processes(process.pid)
    target = {"pid": process.pid}
    (kept,) = exporter.act("empty_cache", target=target)["results"]
    assert kept["freed_bytes"] == 0
    (collected,) = exporter.act("collect_garbage", target=target)["results"]
    assert collected["allocated_before_bytes"] - collected["allocated_after_bytes"] == 4 * (50 << 20)
    assert collected["freed_bytes"] == 0
    (cleared,) = exporter.act("empty_cache", target=target)["results"]
    assert cleared["freed_bytes"] == 4 * (50 << 20)


def check_peaks_are_reset_on_the_device_meant_alone(
    exporter: ExporterProcess, process: TorchProcess, devices: Sequence[int]
) -> None:
    """Of several devices the last one's peaks are reset, and no other's."""
    process.call("start_client")
    for device in devices:
        process.call("alloc", nbytes=64 << 20, device=device)
    process.call("free")
    exporter.wait_for_processes(process.pid)
    exporter.act("reset_peak", target={"pid": process.pid, "uuid": process.call("uuids")[devices[-1]]})
    peaks = [process.call("stats", device=device)["allocated_bytes.all.peak"] for device in devices]
    assert peaks == [64 << 20] * (len(devices) - 1) + [0]


def check_reclaimable_on_expandable_segments(
    exporter: ExporterProcess, process: TorchProcess, *, heaps: int = 10
) -> None:
    """With `expandable_segments:True`: what is reclaimable is right to the page once the heap has been walked."""
    process.call("start_client")
    labels = {"pid": str(process.pid)}
    for seed in range(heaps):
        process.call("free")
        process.call("random_heap", device=0, seed=seed, blocks=60, keep=0.3, largest_bytes=128 << 20)
        whole_pages = _returnable_pages(process.call("snapshot"))
        # Walks over the heap are rationed; until the next one, the figure is an estimate.
        _wait_for_values(exporter, "gpumem_torch_reclaimable_bytes", [whole_pages], **labels)
        (row,) = exporter.act("empty_cache", target={"pid": process.pid})["results"]
        assert row["freed_bytes"] == whole_pages > 0, f"heap {seed}"


def check_a_private_pool_stays_and_the_rest_is_reclaimable(exporter: ExporterProcess, process: TorchProcess) -> None:
    """A captured CUDA graph keeps its pool's memory through a clear; what is reclaimable leaves it out."""
    process.call("start_client")
    labels = {"pid": str(process.pid)}
    process.exec(
        "graph = torch.cuda.CUDAGraph()\n"
        "source = torch.zeros(1 << 20, device='cuda')\n"
        "with torch.cuda.graph(graph):\n"
        "    part = source + 1\n"
        "    result_of_graph = part * 2\n"
        "del part\n"
        "spare = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(3)]\n"
        "del spare"
    )
    exporter.wait_for_processes(process.pid)
    in_pool = process.exec(
        "result = sum(segment['total_size'] for segment in torch.cuda.memory_snapshot()"
        " if tuple(segment['segment_pool_id']) != (0, 0))"
    )
    assert in_pool > 0
    _wait_for_values(exporter, "gpumem_torch_private_pools_bytes", [in_pool], **labels)
    reclaimable = 3 * (30 << 20)
    _wait_for_values(exporter, "gpumem_torch_reclaimable_bytes", [reclaimable], **labels)
    (row,) = exporter.act("empty_cache", target={"pid": process.pid})["results"]
    assert row["freed_bytes"] == reclaimable
    _wait_for_values(exporter, "gpumem_torch_reclaimable_bytes", [0], **labels)
    assert exporter.metrics().value("gpumem_torch_private_pools_bytes", **labels) == in_pool


def _book(books: Books, uuid: str) -> DeviceBook:
    return next(book for book in books() if book.uuid == uuid)


def _wait_for_values(exporter: ExporterProcess, name: str, values: list[float], **labels: str) -> None:
    wait_until_equal(lambda: exporter.metrics().values(name, **labels), values, f"{name} of {labels}")


def _wait_for_heap(exporter: ExporterProcess, process: TorchProcess, stats: Mapping[str, int]) -> Metrics:
    """A scrape that shows this very heap."""
    labels = {"pid": str(process.pid)}
    wanted: dict[str, float] = {name: stats[key] for name, key in COMPARED.items()}
    metrics = exporter.metrics()

    def shown() -> dict[str, float]:
        nonlocal metrics
        metrics = exporter.metrics()
        return {name: sum(metrics.values(name, **labels)) for name in wanted}

    wait_until_equal(shown, wanted, "a sample of this heap")
    return metrics


def _returnable_pages(segments: Sequence[Mapping[str, Any]]) -> int:
    """The bytes of pages that no block in use touches: the client counts from the other side, the free blocks."""
    returnable = 0
    for segment in segments:
        page = PAGE_BYTES[segment["segment_type"]]
        touched: set[int] = set()
        offset = 0
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                touched.update(range(offset // page, (offset + block["size"] - 1) // page + 1))
            offset += block["size"]
        assert segment["is_expandable"]
        returnable += segment["total_size"] - page * len(touched)
    return returnable
