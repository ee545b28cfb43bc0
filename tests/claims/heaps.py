"""Heaps of many shapes: statistics equal torch's, and a clear frees the reclaimable bytes, of pools only sometimes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tests.claims.place import COMPARED, SETTINGS, Bench, Place, pools_of
from tests.claims.values import NotAvailableError, Value, Values, equal, measured, same
from tests.support.torch_release import torch_release

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


# Memory that a clear frees only sometimes: in private pools, on other streams, of other allocators


def living_mem_pool(bench: Bench) -> Values:
    """A MemPool counts as reserved and as private pool, and is not reclaimable until it is deleted."""
    bench.exec(
        "pool = torch.cuda.MemPool()\n"
        "with torch.cuda.use_mem_pool(pool):\n"
        "    inside = torch.empty(50 << 20, dtype=torch.uint8, device='cuda')\n"
        "    torch.empty(70 << 20, dtype=torch.uint8, device='cuda')\n"
        "torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    )
    freed = same({"cache outside of the pool": 100 * MIB, **bench.clear()})
    _, living = bench.settle()
    stats, held = bench.stats(), bench.reserved()
    values: dict[str, Value] = {
        **freed,
        "private pools while it lives": equal(living["private_pools_bytes"], pools_of(bench, stats)),
        "reserved while it lives": equal(living["reserved_bytes"], held),
    }
    used = bench.book().used_bytes
    bench.exec("del inside, pool")
    _, dead = bench.settle()
    for name in ("private_pools", "reserved", "reclaimable"):
        values[f"{name.replace('_', ' ')} after it was deleted"] = equal(dead[f"{name}_bytes"], 0)
    return {
        **values,
        "decrease of the driver's used bytes after it was deleted": equal(used - bench.book().used_bytes, held),
    }


_CAPTURE = (
    "import warnings; warnings.simplefilter('ignore')\n"
    "def capture(nbytes, **arguments):\n"
    "    graph = torch.cuda.CUDAGraph()\n"
    "    with torch.cuda.graph(graph, **arguments):\n"
    "        output = torch.empty(nbytes, dtype=torch.uint8, device='cuda').zero_()\n"
    "    return graph, output\n"
)


def graphs_living_and_dead(bench: Bench) -> Values:
    """Memory of a deleted graph is reclaimable, the memory of a living graph is not; torch's snapshot shows both alike.

    The output of one graph outlives the graph: memory of tensors in private pools is not reclaimable either.
    """
    if torch_release() < (2, 14):
        raise NotAvailableError("before torch 2.14, the memory of a dead graph is not shown as reclaimable")
    bench.exec(
        _CAPTURE + "first, output = capture(40 << 20); second, _ = capture(60 << 20)\n"
        "third, _ = capture(20 << 20, pool=first.pool())\n"
        "del _\n"
        "torch.empty(20 << 20, dtype=torch.uint8, device='cuda')"
    )
    values: dict[str, Value] = {}
    for what, code, nbytes in (
        ("all live", "", 20 * MIB),
        ("one of two in a pool was deleted", "del first", 0),
        ("another was reset", "second.reset()", 60 * MIB),
        ("the last in its pool was deleted", "del third", 20 * MIB),
        ("the output was deleted", "del output", 40 * MIB),
    ):
        bench.exec(code)
        freed = same({"expected": nbytes, **bench.clear()}, at_least=0)
        values |= {f"{name}, {what}": value for name, value in freed.items()}
        held = pools_of(bench, bench.stats())
        values[f"private pools afterwards, {what}"] = equal(bench.once("private_pools_bytes", held), held)
    _, at_the_end = bench.settle()
    return {**values, "reserved at the end": equal(at_the_end["reserved_bytes"], 0)}


def pending_on_another_stream(bench: Bench) -> Values:
    """A freed block that another stream uses stays active and is reclaimable, because a clear waits for the stream."""
    bench.exec(
        "stream = torch.cuda.Stream()\n"
        "large, small = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'), torch.empty(9, device='cuda')\n"
        "kept = torch.empty(9, device='cuda')\n"
        "for tensor in (large, small): tensor.record_stream(stream)\n"
        "del tensor, large, small"
    )
    _, found = bench.settle()
    pending = found["active_bytes"] - found["allocated_bytes"]
    freed = same(bench.clear())
    _, after = bench.settle()
    return {
        "pending before": equal(pending, 64 * MIB + 512),
        **freed,
        "pending after": equal(after["active_bytes"] - after["allocated_bytes"], 0),
        "allocated after": equal(after["allocated_bytes"], 512),
    }


def pinned_host_memory(bench: Bench) -> Values:
    """The value equals the memory of torch's host allocator, cached or not, which is on no device."""
    if not bench.exec("result = hasattr(torch.cuda, 'host_memory_stats')"):
        raise NotAvailableError("torch before 2.7 has no statistics of its host allocator")
    used = bench.book().used_bytes
    values: dict[str, Value] = {}
    for what, code in (
        (
            "two blocks and one in the cache",
            "pinned = [torch.empty(n << 20, dtype=torch.uint8, pin_memory=True) for n in (1, 3, 10)]; del pinned[1]",
        ),
        ("after all were deleted", "del pinned; getattr(torch._C, '_host_emptyCache', int)()"),
    ):
        bench.exec(code)
        metrics, _ = bench.settle()
        stats = bench.exec("result = torch.cuda.host_memory_stats()")
        # older releases: `allocated_bytes` are those in tensors
        by_torch = stats.get("reserved_bytes.current", stats["allocated_bytes.current"])
        by_exporter = metrics.value("gpumem_torch_pinned_host_bytes", pid=str(bench.pid))
        values[f"gpumem_torch_pinned_host_bytes, {what}"] = equal(by_exporter, by_torch)
    rose = bench.book().used_bytes - used
    return {
        **values,
        "driver's used rose": measured(rose, per_device=True),
        "driver's used rose by less than 8 MiB": equal(rose < 8 * MIB, True),
    }


def asynchronous_backend(place: Place) -> Values:
    """With `backend:cudaMallocAsync`, values that torch leaves at a constant 0 are absent."""
    with place.reporting(**{SETTINGS: "backend:cudaMallocAsync"}) as bench:
        bench.exec(
            "try: torch.empty(1 << 44, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass\n"
            "held = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')\n"
            "torch.empty(50 << 20, dtype=torch.uint8, device='cuda')"
        )
        _, found = bench.settle()
        stats, before = bench.stats(), bench.book()
        values: dict[str, Value] = {}
        for name, metric in (
            *((name, "current") for name in ("allocated", "reserved", "active")),
            *((name, "peak") for name in ("allocated", "reserved")),
        ):
            series = f"{name}_bytes" if metric == "current" else f"{name}_peak_bytes"
            truth = stats[f"{name}_bytes.all.{metric}"]
            values[f"gpumem_torch_{series}"] = equal(found.pop(series, None), truth, per_device=True)
        beside = sorted(set(found) - {"slack_ratio", "non_torch_bytes", "peak_resets_total"})
        values["series without a value of torch"] = equal(" ".join(beside) or "none", "none")
        row = bench.result(bench.exporter.act("empty_cache", target={"pid": bench.pid}))
        freed = same(
            {
                "reserved fell": stats["reserved_bytes.all.current"] - bench.reserved(),
                "reserved fell in the action": row["reserved_before_bytes"] - row["reserved_after_bytes"],
                "action freed": row["freed_bytes"],
                "CUDA's free rose": row["device_free_after_bytes"] - row["device_free_before_bytes"],
                "driver's used fell": before.used_bytes - bench.book().used_bytes,
            }
        )
        reset = bench.result(bench.exporter.act("reset_peak", target={"pid": bench.pid}))
        _, found = bench.settle()
        truth = bench.stats()["allocated_bytes.all.peak"]
        return {
            **values,
            "outcome of a clear": equal(row["outcome"], "done"),
            **freed,
            "outcome of a reset of peaks": equal(reset["outcome"], "done"),
            "gpumem_torch_allocated_peak_bytes after it": equal(found["allocated_peak_bytes"], truth),
            "allocated": measured(bench.stats()["allocated_bytes.all.current"]),
        }


def past_the_cache(bench: Bench) -> Values:
    """Memory allocated while the cache is disabled is non-torch memory: only the driver counts it."""
    before = bench.book()
    reserved = bench.reserved()
    bench.exec(
        "torch.cuda.caching_allocator_enable(False)\n"
        "past = torch.empty(40 << 20, dtype=torch.uint8, device='cuda')\n"
        "torch.cuda.caching_allocator_enable(True)"
    )
    rose = bench.book().used_bytes - before.used_bytes
    listed = before.processes.get(bench.pid)
    non_torch = None if listed is None else listed - reserved + 40 * MIB
    if non_torch is not None:
        bench.once("non_torch_bytes", non_torch)
    _, found = bench.settle()
    values = {
        "driver's used rose": equal(rose, 40 * MIB),
        "gpumem_torch_reserved_bytes": equal(found["reserved_bytes"], reserved),
        "gpumem_torch_non_torch_bytes": equal(found.get("non_torch_bytes"), non_torch, per_device=True),
    }
    bench.exec("del past")
    return {**values, "driver's used bytes after it was freed": equal(bench.book().used_bytes - before.used_bytes, 0)}
