"""Out-of-memory errors: their values, and the limit of a memory fraction."""

from __future__ import annotations

from typing import Any

from tests.claims.place import Bench
from tests.claims.values import Values, equal
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

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
