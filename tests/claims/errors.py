"""Out-of-memory errors: their figures, the limit that a fraction sets, and their delivery by a process that dies."""

from __future__ import annotations

from typing import Any

from tests.claims.figures import Figures, shown, true
from tests.claims.place import Bench, Place
from tests.support.ending_programs import end_with
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

__all__ = ["figures_of_an_error", "limit_of_a_fraction", "told_by_the_dying"]

REQUESTED_BYTES = 1 << 42
_RUN_OUT = f"torch.empty({REQUESTED_BYTES}, dtype=torch.uint8, device='cuda')"


def figures_of_an_error(bench: Bench) -> Figures:
    """Requested, free and limit of that moment; the program gets torch's own error."""
    bench.process.call("random_heap", seed=5)
    before, seen = bench.stats()["num_ooms"], _errors(bench.exporter, bench.pid)
    text = bench.exec(f"try: {_RUN_OUT}\nexcept torch.OutOfMemoryError as error: result = str(error)")
    stats, book, cuda = bench.stats(), bench.book(), bench.process.call("mem_get_info")
    detail = _next(bench.exporter, bench.pid, len(seen))["detail"]
    held = detail["allocator"]
    return {
        "torch's text says what was requested": true("4096.00 GiB" in text, True),
        "requested": true(detail["requested_bytes"], REQUESTED_BYTES),
        "free": true(detail["device_free_bytes"], cuda["free"], everywhere=False),
        "free, by the driver": true(detail["device_free_bytes"], book.free_bytes, everywhere=False),
        "limit": true(detail["limit_bytes"], cuda["total"]),
        "limit, by the driver": true(detail["limit_bytes"], book.total_bytes - book.reserved_bytes),
        "allocated": true(held["allocated_bytes"], stats["allocated_bytes.all.current"]),
        "reserved": true(held["reserved_bytes"], stats["reserved_bytes.all.current"]),
        "errors counted by torch": true(stats["num_ooms"] - before, 1),
    }


def limit_of_a_fraction(bench: Bench) -> Figures:
    """Of a process that may have a quarter of the device, that is the limit that the error shows."""
    seen = _errors(bench.exporter, bench.pid)
    total = bench.exec("torch.cuda.set_per_process_memory_fraction(0.25); result = torch.cuda.mem_get_info()[1]")
    bench.exec(
        "try: torch.empty(total // 2, dtype=torch.uint8, device='cuda')\nexcept torch.OutOfMemoryError: pass\n"
        "torch.cuda.set_per_process_memory_fraction(1.0)",
        total=total,
    )
    detail = _next(bench.exporter, bench.pid, len(seen))["detail"]
    return {
        "limit": true(detail["limit_bytes"], int(0.25 * total)),
        "free": true(detail["device_free_bytes"], bench.book().free_bytes, everywhere=False),
        "a quarter fits in what is free": shown(detail["device_free_bytes"] > total // 2),
    }


def told_by_the_dying(place: Place) -> Figures:
    """An error that ends its process: the event is there, the process' series are not."""
    process = place.torch()
    process.call("start_client", workload="doomed")
    process.call("alloc", nbytes=1 << 28)
    shows = {"workload": "doomed"}
    series = "gpumem_torch_allocated_bytes"
    wait_for(lambda: place.exporter.metrics().values(series, **shows) == [1 << 28], "its reports")
    status = end_with(process, _RUN_OUT)
    detail = _next(place.exporter, process.pid, 0)["detail"]
    own = {"pid": str(process.pid)}
    wait_for(lambda: not place.exporter.metrics().values("gpumem_reporter_up", **own), "its end")
    metrics = place.exporter.metrics()
    left = [name for name in metrics.samples if name.startswith("gpumem_torch_") and metrics.values(name, **own)]
    return {
        "exit status": true(status, 1),
        "the program's own error is on stderr": true("OutOfMemoryError" in process.stderr(), True),
        "requested, by the event": true(detail["requested_bytes"], REQUESTED_BYTES),
        "requested, by the series": true(metrics.value("gpumem_last_oom_requested_bytes", **own), REQUESTED_BYTES),
        "allocated at that moment": true(detail["allocator"]["allocated_bytes"], 1 << 28),
        "series left of the process": true(" ".join(left) or "none", "none"),
    }


def _errors(exporter: ExporterProcess, pid: int) -> list[dict[str, Any]]:
    errors: list[dict[str, Any]] = exporter.get(f"/api/v1/events?type=oom&pid={pid}&limit=1000")["events"]
    return errors


def _next(exporter: ExporterProcess, pid: int, seen: int) -> dict[str, Any]:
    """The process' error after so many."""
    return wait_for(lambda: _errors(exporter, pid)[seen:], "the error")[0]
