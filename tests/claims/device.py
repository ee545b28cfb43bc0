"""What the driver says of a device and of whoever is on it, and in which pieces memory is taken from it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

from tests.claims.figures import Figure, Figures, alike, shown, true
from tests.claims.place import Bench, Place
from tests.support.waiting import wait_for, wait_until_equal

__all__ = [
    "context_of_a_process",
    "ledgers_add_up",
    "memory_of_the_device",
    "processes_of_the_device",
    "segments",
]

MIB = 1 << 20


def memory_of_the_device(place: Place) -> Figures:
    """Total, reserved, used and free: the driver's and the page's, and CUDA's two figures beside them."""
    bench = place.process()
    bench.process.call("alloc", nbytes=1 << 30)  # so that it is not an empty device that is compared
    book = bench.book()
    cuda = bench.process.call("mem_get_info")
    labels = {"gpu": str(book.index), "uuid": book.uuid}
    name = "gpumem_device_memory_used_bytes"
    wait_until_equal(lambda: bench.exporter.metrics().values(name, **labels), [book.used_bytes], name)
    metrics = bench.exporter.metrics()
    (info,) = [dict(found) for found in metrics.samples["gpumem_device_info"] if labels.items() <= dict(found).items()]
    free = metrics.value("gpumem_device_memory_free_bytes", **labels)
    told = {
        field: metrics.value(f"gpumem_device_memory_{field}_bytes", **labels) for field in ("total", "reserved", "used")
    }
    return {
        "name": true(info["name"], book.name),
        "gpumem_device_up": true(metrics.value("gpumem_device_up", **labels), 1),
        "total": true(int(told["total"]), book.total_bytes),
        "reserved": true(int(told["reserved"]), book.reserved_bytes),
        "used": true(int(told["used"]), book.used_bytes, everywhere=False),
        "free + used + reserved": true(int(free + told["used"] + told["reserved"]), book.total_bytes),
        "total, by CUDA": true(cuda["total"], book.total_bytes - book.reserved_bytes),
        "free, by CUDA": true(cuda["free"], book.free_bytes, everywhere=False),
        "used that no process owns": shown(book.unattributed_bytes),
        "health": true(bench.exporter.get("/health")["status"], "ok"),
    }


def processes_of_the_device(bench: Bench) -> Figures:
    """The driver lists a process under the pid that it has here, with its bytes; elsewhere it has no such series."""
    bench.process.call("random_heap", seed=3)
    labels = {"uuid": bench.uuid, "pid": str(bench.pid)}
    used = bench.book().processes.get(bench.pid)
    if used is not None:
        bench.wait_until_listed(used)
    found = bench.exporter.metrics().values("gpumem_process_memory_used_bytes", **labels)
    return {
        "listed under its own pid": shown(used is not None),
        "gpumem_process_memory_used_bytes": true(found[0] if found else None, used, everywhere=False),
        "used, less what torch reserved": shown(None if used is None else used - bench.reserved()),
        "processes listed": shown(len(bench.book().processes)),
    }


def context_of_a_process(place: Place) -> Figures:
    """What a process takes of a device before it holds a tensor there: its context, all of it non-torch."""
    place.process()  # the exporter and whatever else there is are up
    before = place.books()
    with place.reporting() as bench:
        after, (was,) = bench.book(), [book for book in before if book.uuid == bench.uuid]
        reserved, listed = bench.reserved(), after.processes.get(bench.pid)
        non_torch = None if listed is None else listed - reserved
        if non_torch is not None:
            bench.once("non_torch_bytes", non_torch)
        _, found = bench.settle()
        figures: dict[str, Figure] = {
            "reserved by torch": true(reserved, 0),
            "driver's used rose": shown(after.used_bytes - was.used_bytes),
            "gpumem_torch_non_torch_bytes": true(found.get("non_torch_bytes"), non_torch, everywhere=False),
        }
    with contextlib.suppress(AssertionError):
        wait_for(lambda: bench.book().used_bytes <= was.used_bytes, "the driver to have its bytes back")
    return {**figures, "driver's used once it has ended": true(bench.book().used_bytes - was.used_bytes, 0)}


def segments(bench: Bench) -> Figures:
    """What torch takes from the driver for one block, by its size, and what the driver gives."""
    figures: dict[str, Figure] = {}
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
        figures[f"{what}: reserved"] = alike(took)
        figures[f"{what}: used, by the driver"] = true(bench.book().used_bytes - used, took)
        bench.process.call("free", numbers=[number])
        bench.process.call("empty_cache")
    return figures


def ledgers_add_up(place: Place, processes: int = 4, scrapes: int = 60, devices: Sequence[int] = (0,)) -> Figures:
    """The categories of every device add up to its total, in every scrape, while processes allocate and free."""
    churning = [place.torch() for _ in range(processes)]
    for number, process in enumerate(churning):
        process.call("start_client", workload=f"churn-{number % 3}")
        chosen = [devices[(number + further) % len(devices)] for further in range(2)]
        process.call("start_churn", devices=chosen, seed=number)
    try:
        place.exporter.wait_for_processes(*(process.pid for process in churning))
        return _scraped(place, scrapes)
    finally:
        for process in churning:
            process.close()


def _scraped(place: Place, scrapes: int) -> Figures:
    uuids = {book.uuid for book in place.books()}
    wrong, seen = 0, set()
    for _ in range(scrapes):
        metrics = place.exporter.metrics()
        ledgers = metrics.ledgers()
        try:
            metrics.assert_ledgers_add_up()
        except AssertionError:
            wrong += 1
        wrong += ledgers.keys() != uuids
        seen.add(str(ledgers))
    return {
        "scrapes": alike(scrapes),
        "scrapes in which a ledger does not add up, or is missing": true(wrong, 0),
        "more than ten differ: something moved": true(len(seen) > 10, True),
    }
