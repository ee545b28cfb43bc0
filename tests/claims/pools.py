"""Memory that a clear gives back only at times, or never: in private pools, on other streams, of other allocators."""

from __future__ import annotations

from tests.claims.figures import Figure, Figures, NotHereError, OneNumber, alike, true
from tests.claims.place import SETTINGS, Bench, Place, pools_of

__all__ = [
    "asynchronous_backend",
    "graphs_living_and_dead",
    "living_mem_pool",
    "past_the_cache",
    "pending_on_another_stream",
    "pinned_host_memory",
]

MIB = 1 << 20


def living_mem_pool(bench: Bench) -> Figures:
    """A MemPool counts in reserved and in private pools, and is not reclaimable until it has gone."""
    bench.exec(
        "pool = torch.cuda.MemPool()\n"
        "with torch.cuda.use_mem_pool(pool):\n"
        "    inside = torch.empty(50 << 20, dtype=torch.uint8, device='cuda')\n"
        "    torch.empty(70 << 20, dtype=torch.uint8, device='cuda')\n"
        "torch.empty(100 << 20, dtype=torch.uint8, device='cuda')"
    )
    freed = OneNumber()
    freed.add({"the cache beside it": 100 * MIB, **bench.clear()})
    _, living = bench.settle()
    stats, held = bench.stats(), bench.reserved()
    figures: dict[str, Figure] = {
        **freed.figures(),
        "private pools while it lives": true(living["private_pools_bytes"], pools_of(bench, stats)),
        "reserved while it lives": true(living["reserved_bytes"], held),
    }
    used = bench.book().used_bytes
    bench.exec("del inside, pool")
    _, dead = bench.settle()
    for name in ("private_pools", "reserved", "reclaimable"):
        figures[f"{name.replace('_', ' ')} when it has gone"] = true(dead[f"{name}_bytes"], 0)
    return {**figures, "driver's used fell when it went": true(used - bench.book().used_bytes, held)}


_CAPTURE = (
    "import warnings; warnings.simplefilter('ignore')\n"
    "def capture(nbytes, **arguments):\n"
    "    graph = torch.cuda.CUDAGraph()\n"
    "    with torch.cuda.graph(graph, **arguments):\n"
    "        output = torch.empty(nbytes, dtype=torch.uint8, device='cuda').zero_()\n"
    "    return graph, output\n"
)


def graphs_living_and_dead(bench: Bench) -> Figures:
    """A dead graph's memory is reclaimable and a living one's is not, though both look alike in torch's snapshot.

    The output of one graph outlives it; what tensors hold in private pools is not reclaimable either.
    """
    bench.exec(
        _CAPTURE + "first, output = capture(40 << 20); second, _ = capture(60 << 20)\n"
        "third, _ = capture(20 << 20, pool=first.pool())\n"
        "del _\n"
        "torch.empty(20 << 20, dtype=torch.uint8, device='cuda')"
    )
    figures: dict[str, Figure] = {}
    for what, code, nbytes in (
        ("all live", "", 20 * MIB),
        ("one of two in a pool has gone", "del first", 0),
        ("another was reset", "second.reset()", 60 * MIB),
        ("the last in its pool has gone", "del third", 20 * MIB),
        ("the output has gone", "del output", 40 * MIB),
    ):
        bench.exec(code)
        freed = OneNumber()
        freed.add({"as it must be": nbytes, **bench.clear()})
        figures |= {f"{name}, {what}": figure for name, figure in freed.figures(at_least=0).items()}
        held = pools_of(bench, bench.stats())
        figures[f"private pools afterwards, {what}"] = true(bench.once("private_pools_bytes", held), held)
    _, at_the_end = bench.settle()
    return {**figures, "reserved at the end": true(at_the_end["reserved_bytes"], 0)}


def pending_on_another_stream(bench: Bench) -> Figures:
    """It is in no tensor any more, still active, and a clear waits for it and returns it: so it is reclaimable."""
    bench.exec(
        "stream = torch.cuda.Stream()\n"
        "large, small = torch.empty(64 << 20, dtype=torch.uint8, device='cuda'), torch.empty(9, device='cuda')\n"
        "kept = torch.empty(9, device='cuda')\n"
        "for tensor in (large, small): tensor.record_stream(stream)\n"
        "del tensor, large, small"
    )
    _, found = bench.settle()
    pending = found["active_bytes"] - found["allocated_bytes"]
    freed = OneNumber()
    freed.add(bench.clear())
    _, after = bench.settle()
    return {
        "pending before": true(pending, 64 * MIB + 512),
        **freed.figures(),
        "pending after": true(after["active_bytes"] - after["allocated_bytes"], 0),
        "allocated after": true(after["allocated_bytes"], 512),
    }


def pinned_host_memory(bench: Bench) -> Figures:
    """It is what torch's host allocator holds, cached or not, and on no device."""
    if not bench.exec("result = hasattr(torch.cuda, 'host_memory_stats')"):
        raise NotHereError("torch tells what its host allocator holds since 2.7")
    used = bench.book().used_bytes
    figures: dict[str, Figure] = {}
    for what, code in (
        (
            "two blocks and one in the cache",
            "pinned = [torch.empty(n << 20, dtype=torch.uint8, pin_memory=True) for n in (1, 3, 10)]; del pinned[1]",
        ),
        ("what is left of them", "del pinned; getattr(torch._C, '_host_emptyCache', int)()"),
    ):
        bench.exec(code)
        metrics, _ = bench.settle()
        said = bench.exec("result = torch.cuda.host_memory_stats()['allocated_bytes.current']")
        told = metrics.value("gpumem_torch_pinned_host_bytes", pid=str(bench.pid))
        figures[f"gpumem_torch_pinned_host_bytes, {what}"] = true(told, said)
    # What pinning takes of the driver is its own affair, and not the tensors' bytes.
    return {**figures, "driver's used rose": alike(bench.book().used_bytes - used, within=8 * MIB)}


def asynchronous_backend(place: Place) -> Figures:
    """`backend:cudaMallocAsync`: what it tells is shown, what its statistics leave at a constant 0 is absent."""
    with place.reporting(**{SETTINGS: "backend:cudaMallocAsync"}) as bench:
        bench.exec(
            "try: torch.empty(1 << 44, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass\n"
            "held = torch.empty(30 << 20, dtype=torch.uint8, device='cuda')\n"
            "torch.empty(50 << 20, dtype=torch.uint8, device='cuda')"
        )
        _, found = bench.settle()
        stats, before = bench.stats(), bench.book()
        figures: dict[str, Figure] = {}
        for name, metric in (
            *((name, "current") for name in ("allocated", "reserved", "active")),
            *((name, "peak") for name in ("allocated", "reserved")),
        ):
            series = f"{name}_bytes" if metric == "current" else f"{name}_peak_bytes"
            truth = stats[f"{name}_bytes.all.{metric}"]
            figures[f"gpumem_torch_{series}"] = true(found.pop(series, None), truth, everywhere=False)
        beside = sorted(set(found) - {"slack_ratio", "non_torch_bytes", "peak_resets_total"})
        figures["series that it cannot tell"] = true(" ".join(beside) or "none", "none")
        row = bench.result(bench.exporter.act("empty_cache", target={"pid": bench.pid}))
        freed = OneNumber()
        freed.add(
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
            **figures,
            "outcome of a clear": true(row["outcome"], "done"),
            **freed.figures(),
            "outcome of a reset of peaks": true(reset["outcome"], "done"),
            "gpumem_torch_allocated_peak_bytes after it": true(found["allocated_peak_bytes"], truth),
            "allocated": alike(bench.stats()["allocated_bytes.all.current"]),
        }


def past_the_cache(bench: Bench) -> Figures:
    """Memory allocated past a disabled cache: torch does not count it, the driver does."""
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
    figures = {
        "driver's used rose": true(rose, 40 * MIB),
        "gpumem_torch_reserved_bytes": true(found["reserved_bytes"], reserved),
        "gpumem_torch_non_torch_bytes": true(found.get("non_torch_bytes"), non_torch, everywhere=False),
    }
    bench.exec("del past")
    return {**figures, "driver's used once it has gone": true(bench.book().used_bytes - before.used_bytes, 0)}
