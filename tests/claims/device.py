"""The driver's values of a device and its processes, and the segments that torch allocates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tests.claims.place import Bench, Place
from tests.claims.values import Value, Values, equal, measured
from tests.support.waiting import wait_for, wait_until_equal

MIB = 1 << 20
SCRAPES = 60


def memory_of_the_device(place: Place) -> Values:
    """Total, reserved, used and free in the scrape equal the driver's values and CUDA's."""
    bench = place.process()
    bench.process.call("alloc", nbytes=1 << 30)  # an empty device would show less
    book = bench.book()
    cuda = bench.process.call("mem_get_info")
    labels = {"gpu": str(book.index), "uuid": book.uuid}
    name = "gpumem_device_memory_used_bytes"
    wait_until_equal(lambda: bench.exporter.metrics().values(name, **labels), [book.used_bytes], name)
    metrics = bench.exporter.metrics()
    (info,) = [dict(found) for found in metrics.samples["gpumem_device_info"] if labels.items() <= dict(found).items()]
    free = metrics.value("gpumem_device_memory_free_bytes", **labels)
    scraped = {
        field: metrics.value(f"gpumem_device_memory_{field}_bytes", **labels) for field in ("total", "reserved", "used")
    }
    return {
        "name": equal(info["name"], book.name),
        "gpumem_device_up": equal(metrics.value("gpumem_device_up", **labels), 1),
        "total": equal(int(scraped["total"]), book.total_bytes),
        "reserved": equal(int(scraped["reserved"]), book.reserved_bytes),
        "used": equal(int(scraped["used"]), book.used_bytes, per_device=True),
        "free + used + reserved": equal(int(free + scraped["used"] + scraped["reserved"]), book.total_bytes),
        "total, by CUDA": equal(cuda["total"], book.total_bytes - book.reserved_bytes),
        "free, by CUDA": equal(cuda["free"], book.free_bytes, per_device=True),
        "health": equal(bench.exporter.get("/health")["status"], "ok"),
    }


def context_of_a_process(place: Place) -> Values:
    """The memory that a process uses before its first tensor is its context: non-torch memory."""
    place.process()  # starts the exporter
    before = place.books()
    with place.reporting() as bench:
        after, (was,) = bench.book(), [book for book in before if book.uuid == bench.uuid]
        reserved, listed = bench.reserved(), after.processes.get(bench.pid)
        non_torch = None if listed is None else listed - reserved
        if non_torch is not None:
            bench.once("non_torch_bytes", non_torch)
        _, found = bench.settle()
        values: dict[str, Value] = {
            "reserved by torch": equal(reserved, 0),
            "driver's used bytes of the context": measured(after.used_bytes - was.used_bytes, per_device=True),
            "gpumem_torch_non_torch_bytes": equal(found.get("non_torch_bytes"), non_torch, per_device=True),
        }
    with contextlib.suppress(AssertionError):
        wait_for(lambda: bench.book().used_bytes <= was.used_bytes, "the driver to free the context")
    return {**values, "driver's used bytes after the exit": equal(bench.book().used_bytes - was.used_bytes, 0)}


def segments(bench: Bench) -> Values:
    """The driver's used bytes increase by the segment that torch reserves for a block."""
    values: dict[str, Value] = {}
    for what, nbytes in (
        ("1 byte", 1),
        ("1 MiB", MIB),
        ("1 MiB and 1 byte", MIB + 1),
        ("10 MiB less 512 bytes", 10 * MIB - 512),
        ("11 MiB", 11 * MIB),
        ("33 MiB and 1 byte", 33 * MIB + 1),
    ):
        reserved, used = bench.reserved(), bench.book().used_bytes
        number = bench.process.call("alloc", nbytes=nbytes)
        took = bench.reserved() - reserved
        values[f"{what}: reserved"] = measured(took)
        values[f"{what}: used, by the driver"] = equal(bench.book().used_bytes - used, took)
        bench.process.call("free", numbers=[number])
        bench.process.call("empty_cache")
    return values


def ledgers_add_up(place: Place, devices: Sequence[int] = (0,)) -> Values:
    """The categories of every device add up to its total in every scrape while processes allocate and free."""
    churning = [place.torch() for _ in range(4)]
    for number, process in enumerate(churning):
        process.call("start_client", workload=f"churn-{number % 3}")
        chosen = [devices[(number + further) % len(devices)] for further in range(2)]
        process.call("start_churn", devices=chosen, seed=number)
    try:
        place.exporter.wait_for_processes(*(process.pid for process in churning))
        return _scraped(place)
    finally:
        for process in churning:
            process.close()


def _scraped(place: Place) -> Values:
    uuids = {book.uuid for book in place.books()}
    wrong, seen = 0, set()
    for _ in range(SCRAPES):
        metrics = place.exporter.metrics()
        ledgers = metrics.ledgers()
        try:
            metrics.assert_ledgers_add_up()
        except AssertionError:
            wrong += 1
        wrong += ledgers.keys() != uuids
        seen.add(str(ledgers))
    return {
        "scrapes": measured(SCRAPES),
        "scrapes with a missing ledger or a wrong sum": equal(wrong, 0),
        "more than ten scrapes differ": equal(len(seen) > 10, True),
    }
