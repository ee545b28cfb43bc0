"""Memory that a clear frees only sometimes: in private pools, on other streams, of other allocators."""

from __future__ import annotations

from tests.claims.place import SETTINGS, Bench, Place, pools_of
from tests.claims.values import NotAvailableError, Value, Values, equal, measured, same
from tests.support.torch_release import torch_release

MIB = 1 << 20


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
    """Memory of a deleted graph is reclaimable, that of a living graph is not; torch's snapshot shows both alike.

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
