"""Actions measure their effect, and wait during a graph capture."""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.claims.place import Bench
from tests.claims.values import Values, equal
from tests.support.waiting import wait_for

MIB = 1 << 20


def dry_run_touches_nothing(bench: Bench) -> Values:
    """A dry run returns the bytes that a clear would free, and frees nothing."""
    bench.process.call("random_heap", seed=12)
    bench.settle()
    stats, used = bench.stats(), bench.book().used_bytes
    dry = bench.exporter.act("empty_cache", target={"pid": bench.pid}, dry_run=True)
    untouched = bench.stats() == stats
    row = bench.result(bench.exporter.act("empty_cache", target={"pid": bench.pid}))
    return {
        "freed bytes of the dry run": equal(bench.result(dry)["freed_bytes"], row["freed_bytes"]),
        "memory_stats are unchanged": equal(untouched, True),
        "decrease of the driver's used bytes by the clear": equal(used - bench.book().used_bytes, row["freed_bytes"]),
    }


def cycles_go_with_a_collection(bench: Bench) -> Values:
    """A clear keeps tensors in reference cycles; after a garbage collection, a clear frees them."""
    bench.exec(
        "import gc; gc.disable()\n"
        "for _ in range(4):\n"
        "    knot = [torch.empty(50 << 20, dtype=torch.uint8, device='cuda')]\n"
        "    knot.append(knot)\n"
        "del knot"
    )
    try:
        target = {"pid": bench.pid, "uuid": bench.uuid}
        kept = bench.result(bench.exporter.act("empty_cache", target=target))
        collected = bench.result(bench.exporter.act("collect_garbage", target=target))
        cleared = bench.result(bench.exporter.act("empty_cache", target=target))
    finally:
        bench.exec("gc.enable()")
    fell = collected["allocated_before_bytes"] - collected["allocated_after_bytes"]
    return {
        "freed by a clear": equal(kept["freed_bytes"], 0),
        "decrease of allocated bytes by a collection": equal(fell, 4 * (50 << 20)),
        "freed by a collection": equal(collected["freed_bytes"], 0),
        "freed by a clear after it": equal(cleared["freed_bytes"], 4 * (50 << 20)),
    }


def peaks_are_reset(bench: Bench, devices: tuple[int, ...] = (0,)) -> Values:
    """Only the peaks of the target device are reset."""
    for device in devices:
        bench.process.call("alloc", nbytes=64 << 20, device=device)
    bench.process.call("free")
    uuid = bench.uuids[devices[-1]]
    wait_for(lambda: bench.series("allocated_peak_bytes", devices[-1]), "a report of that device")
    bench.exporter.act("reset_peak", target={"pid": bench.pid, "uuid": uuid})
    return {
        f"peak of device {device} after it": equal(
            bench.stats(device)["allocated_bytes.all.peak"], 0 if device == devices[-1] else 64 << 20
        )
        for device in devices
    }


_CAPTURING = """
import pathlib, time
graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device='cuda')
with torch.cuda.graph(graph):
    counter += 1
    pathlib.Path(capturing).touch()
    while not pathlib.Path(go_on).exists(): time.sleep(0.001)
    counter += 1
for _ in range(3): graph.replay()
result = counter.item()
"""


def waits_in_a_capture(bench: Bench) -> Values:
    """A clear waits while a CUDA graph is captured; the capture survives reports and the wait; then a clear is done."""
    bench.process.call("free", numbers=[bench.process.call("alloc", nbytes=64 * MIB)])
    with tempfile.TemporaryDirectory() as folder:
        capturing, go_on = Path(folder) / "capturing", Path(folder) / "go_on"
        request = bench.process.send("exec", code=_CAPTURING, capturing=str(capturing), go_on=str(go_on))
        try:
            wait_for(capturing.exists, "the capture")
            reports = _accepted(bench)
            wait_for(lambda: _accepted(bench) > reports + 3, "reports during the capture")
            late = bench.result(bench.exporter.act("empty_cache", target={"pid": bench.pid}, deadline_seconds=1.0))
        finally:
            go_on.touch()
        bench.process.receive(request)
    done = bench.result(bench.exporter.act("empty_cache", target={"pid": bench.pid}))
    return {
        "outcome during the capture": equal(late["outcome"], "expired"),
        "outcome after it": equal(done["outcome"], "done"),
    }


def _accepted(bench: Bench) -> float:
    return bench.exporter.metrics().value("gpumem_reports_total", outcome="accepted")
