"""Actions measure their effect, and wait during a graph capture; out-of-memory errors have their values and limit."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

from tests.claims.place import Bench
from tests.claims.values import Values, equal
from tests.support.servers.exporter_process import ExporterProcess
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


REQUESTED_BYTES = 1 << 42
_RUN_OUT = f"torch.empty({REQUESTED_BYTES}, dtype=torch.uint8, device='cuda')"


def values_of_an_error(bench: Bench) -> Values:
    """The event has the requested, free and limit bytes at the time of the error; the program gets torch's error."""
    bench.process.call("random_heap", seed=5)
    before, seen = bench.stats()["num_ooms"], _errors(bench.exporter, bench.pid)
    text = bench.exec(f"try: {_RUN_OUT}\nexcept torch.OutOfMemoryError as error: result = str(error)")
    stats, book, cuda = bench.stats(), bench.book(), bench.process.call("mem_get_info")
    detail = _next(bench.exporter, bench.pid, len(seen))["detail"]
    held = detail["allocator"]
    return {
        "torch's message has the requested size": equal("4096.00 GiB" in text, True),
        "requested": equal(detail["requested_bytes"], REQUESTED_BYTES),
        "free": equal(detail["device_free_bytes"], cuda["free"], per_device=True),
        "free, by the driver": equal(detail["device_free_bytes"], book.free_bytes, per_device=True),
        "limit": equal(detail["limit_bytes"], cuda["total"]),
        "limit, by the driver": equal(detail["limit_bytes"], book.total_bytes - book.reserved_bytes),
        "allocated": equal(held["allocated_bytes"], stats["allocated_bytes.all.current"]),
        "reserved": equal(held["reserved_bytes"], stats["reserved_bytes.all.current"]),
        "errors counted by torch": equal(stats["num_ooms"] - before, 1),
    }


def limit_of_a_fraction(bench: Bench) -> Values:
    """The limit of an error is the memory fraction of the process."""
    seen = _errors(bench.exporter, bench.pid)
    total = bench.exec("torch.cuda.set_per_process_memory_fraction(0.25); result = torch.cuda.mem_get_info()[1]")
    bench.exec(
        "try: torch.empty(total // 2, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass\n"
        "torch.cuda.set_per_process_memory_fraction(1.0)",
        total=total,
    )
    detail = _next(bench.exporter, bench.pid, len(seen))["detail"]
    return {
        "limit": equal(detail["limit_bytes"], int(0.25 * total)),
        "free": equal(detail["device_free_bytes"], bench.book().free_bytes, per_device=True),
    }


def _errors(exporter: ExporterProcess, pid: int) -> list[dict[str, Any]]:
    errors: list[dict[str, Any]] = exporter.get(f"/api/v1/events?type=oom&pid={pid}&limit=1000")["events"]
    return errors


def _next(exporter: ExporterProcess, pid: int, seen: int) -> dict[str, Any]:
    """Return the first error of the process after the first `seen` ones."""
    return wait_for(lambda: _errors(exporter, pid)[seen:], "the error")[0]
