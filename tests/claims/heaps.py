"""Heaps of many shapes: each statistic equals torch's, and a clear frees exactly the reclaimable bytes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tests.claims.place import COMPARED, Bench, Place
from tests.claims.values import Value, Values, equal, measured, same

MIB = 1 << 20
PAGE_BYTES = {"small": 2 * MIB, "large": 20 * MIB}
"""The page size of the expandable segments in each pool."""


def every_series_is_what_torch_says(bench: Bench, devices: Sequence[int] = (0,)) -> Values:
    """Every gauge and counter equals `torch.cuda.memory_stats` of the process.

    The driver's value is compared if the driver lists the process under its own pid.
    """
    for device in devices:
        bench.process.call("random_heap", device=device, seed=device, blocks=200)
    bench.exec(
        # an error that the program catches, after a retry that flushed the cache
        "try:\n    torch.empty(1 << 40, dtype=torch.uint8, device='cuda:0')\nexcept torch.OutOfMemoryError: pass"
    )
    values: dict[str, Value] = {}
    for device in devices:
        stats, book = bench.stats(device), bench.book(device)
        bench.once("ooms_total", stats["num_ooms"], device)
        bench.once("allocated_bytes", stats["allocated_bytes.all.current"], device)
        used = book.processes.get(bench.pid)
        labels = {"gpu": str(book.index), "uuid": book.uuid, "pid": str(bench.pid)}
        if used is not None:
            bench.wait_until_listed(used, device)
            bench.once("non_torch_bytes", used - stats["reserved_bytes.all.current"], device)
        metrics = bench.exporter.metrics()
        where = f" of device {device}" if len(devices) > 1 else ""
        for name, key in COMPARED.items():
            (value,) = metrics.values(name, **labels) or (None,)
            values[name + where] = equal(value if value is None else int(value), stats[key])
        reserved, allocated = (stats[f"{name}_bytes.all.current"] for name in ("reserved", "allocated"))
        (non_torch,) = metrics.values("gpumem_torch_non_torch_bytes", **labels) or (None,)
        truth = None if used is None else used - reserved
        values["gpumem_torch_non_torch_bytes" + where] = equal(non_torch, truth, per_device=True)
        slack = metrics.value("gpumem_torch_slack_ratio", **labels)
        values["gpumem_torch_slack_ratio" + where] = equal(slack, (reserved - allocated) / reserved)
    return values


def random_heaps_of_streams(bench: Bench, heaps: int = 8, *, by_pages: bool = False) -> Values:
    """Heaps of small and large blocks on three streams.

    With `by_pages`, all segments are expandable and have pages of PAGE_BYTES, and the freed bytes also equal the pages
    that no block in the snapshot uses.
    """
    rounds = []
    for seed in range(heaps):
        bench.process.call("free")
        bench.exec(
            "streams = [torch.cuda.default_stream(), torch.cuda.Stream(), torch.cuda.Stream()]\n"
            "for number, stream in enumerate(streams):\n"
            "    with torch.cuda.stream(stream):\n"
            "        worker.random_heap(seed=10 * seed + number, blocks=40, keep=keep, largest_bytes=128 << 20)",
            seed=seed,
            keep=(seed % 6) / 8,
        )
        counted: dict[str, float | None] = {}
        if by_pages:
            counted["pages that no block uses"] = _untouched_pages(bench.process.call("snapshot"))
        rounds.append({**counted, **bench.clear()})
    values = same(*rounds, at_least=math.ceil(0.8 * heaps))
    return {**values, "inactive split": equal(bench.series("inactive_split_bytes")[0], 0)} if by_pages else values


def _untouched_pages(segments: Sequence[Mapping[str, Any]]) -> int:
    """Return the bytes of the pages without a used block; the client computes them from the free blocks."""
    untouched = 0
    for segment in segments:
        page = PAGE_BYTES[segment["segment_type"]]
        touched: set[int] = set()
        offset = 0
        for block in segment["blocks"]:
            if block["state"] != "inactive":
                touched.update(range(offset // page, (offset + block["size"] - 1) // page + 1))
            offset += block["size"]
        assert segment["is_expandable"]
        untouched += segment["total_size"] - page * len(touched)
    return untouched


def max_split_size(place: Place) -> Values:
    """The allocator never splits blocks above `max_split_size_mb`."""
    with place.reporting(PYTORCH_CUDA_ALLOC_CONF="max_split_size_mb:32") as bench:
        values = random_heaps_of_streams(bench, 4)
        return {**values, "max_split_size, by torch": equal(bench.stats()["max_split_size"], 32 * MIB)}


def memory_fraction(place: Place) -> Values:
    """With a memory fraction and `garbage_collection_threshold`, the allocator frees segments by itself."""
    with place.reporting(PYTORCH_CUDA_ALLOC_CONF="garbage_collection_threshold:0.5") as bench:
        total = bench.exec("torch.cuda.set_per_process_memory_fraction(0.25); result = torch.cuda.mem_get_info()[1]")
        block = total // 256 >> 20 << 20
        bench.exec("for n in range(1, 40): torch.empty(n * block, dtype=torch.uint8, device='cuda')", block=block)
        segments_freed = bench.stats()["segment.all.freed"]
        return {
            **same(bench.clear()),
            "the allocator freed segments by itself": equal(segments_freed > 0, True),
            "segments freed by the allocator": measured(segments_freed),
        }
