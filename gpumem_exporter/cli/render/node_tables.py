"""The tables of `info`, and the sentences about a node that `info`, `top` and `fleet` share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, counted, human_bytes
from gpumem_exporter.cli.render.columns import DEVICE_COLUMNS, PROCESS_COLUMNS, legend, rows_of
from gpumem_exporter.cli.render.layout import Layout, chosen
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.core.ledger import CATEGORIES, sum_of_known

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Document = Mapping[str, Any]

DEMO_NOTICE = "DEMO: simulated devices and processes"
NO_PROCESS = "There is no process on a device, and no process that reports."

WORTH_SAYING = 0.05
"""The share of what a clear would free from which the summary says that it would be reserved again."""
_ONE_TABLE_WIDTH = 150
"""The width from which the identity and the memory of a process fit in one row."""

_DEVICES = chosen(DEVICE_COLUMNS, "gpu", "device", "total", "free", "allocatable", "busy", "memory")
_NAMES = ("pid", "workload", "rank")
_STATE = ("command", "state", "age")
_MEMORY = ("gpu", "used", "allocated", "reserved", "idle cache", "reclaimable", "fragmented", "non-torch")


def node_tables(devices: Document, processes: Document, *, width: int) -> Iterator[RenderableType]:
    """Yield all that `info` shows, from top to bottom, for a terminal of `width` columns."""
    if devices.get("source") == "demo":
        yield plain(DEMO_NOTICE, "bold yellow")
    listed = devices.get("devices") or []
    if listed:
        yield plain("Devices", "bold")
        yield from Layout(_DEVICES, listed, width).lines(listed)
        yield legend(listed)
    for error in errors_of(devices):
        yield plain(error, "bold red")
    yield from _ledger_tables([device for device in listed if device.get("ledger")], width)
    yield plain("")
    running = processes.get("processes") or []
    yield from _process_tables(running, width) if running else (plain(NO_PROCESS),)
    yield plain("")
    yield plain(clear_summary(running), "bold")


def cache_sentence(idle: int | None, reclaimable: int, unknown: int) -> str:
    """Return the idle cache and what a clear would free now, without a period at the end.

    `unknown` are the reclaimable bytes of processes whose idle cache is unknown; they are not in `idle`.
    """
    freed = f"clear would free {human_bytes(reclaimable)} now"
    if idle is None:
        return f"A {freed}"
    rest = reclaimable - unknown - idle
    part = "most" if rest > reclaimable / 2 else human_bytes(rest)
    fate = f", {part} of it would be reserved again" if rest >= WORTH_SAYING * reclaimable > 0 else ""
    return f"Idle cache: {'at least ' if unknown else ''}{human_bytes(idle)}; a {freed}{fate}"


def clear_summary(processes: Sequence[Document]) -> str:
    """Return the idle cache and how much memory a clear of all processes would free, where they are known."""
    able = [process.get("devices") or () for process in processes if process.get("reporting") and _clears(process)]
    if not able:
        return "A clear would free nothing: no process accepts this action."
    freed = [sum_of_known([device.get("reclaimable_bytes") for device in devices] or [None]) for devices in able]
    if not any(size is not None for size in freed):
        return "It is not known how much memory a clear would free."
    idle = [device.get("idle_cache_bytes") for devices in able for device in devices]
    unknown_idle = sum(
        device.get("reclaimable_bytes") or 0
        for devices in able
        for device in devices
        if device.get("idle_cache_bytes") is None
    )
    known_idle = sum_of_known(idle) if idle else None
    sentence = cache_sentence(known_idle, sum(size or 0 for size in freed), unknown_idle)
    freeing = sum(1 for size in freed if size)
    where = f"in {freeing} of {counted(len(able), 'reporting process', 'reporting processes')}"
    unknown = sum(
        1 for size, devices in zip(freed, able, strict=True) if size is None or any(map(_lacks_reclaimable, devices))
    )
    return f"{sentence} ({where}; unknown for {unknown})." if unknown else f"{sentence} ({where})."


def errors_of(devices: Document) -> Iterator[str]:
    """Yield why the exporter has no driver, and the error of each device that does not answer."""
    nvml = devices.get("nvml") or {}
    if not nvml.get("up"):
        yield f"driver: {nvml.get('error') or 'not read yet'}"
    for device in devices.get("devices") or ():
        if not device.get("up", True):
            yield f"gpu {device['gpu'] or device['uuid']}: {device.get('error') or 'does not answer'}"


def _ledger_tables(devices: Sequence[Document], width: int) -> Iterator[RenderableType]:
    """A column for each device, in several tables of about equal size if the terminal is narrow."""
    if not devices:
        return
    rows = [(name, [human_bytes(device["ledger"].get(name)) for device in devices]) for name in CATEGORIES]
    rows.append(("total", [human_bytes((device.get("memory") or {}).get("total_bytes")) for device in devices]))
    headings = [f"gpu {device.get('gpu') or UNKNOWN}" for device in devices]
    column_width = 1 + max(len(cell) for cells in (headings, *(cells for _, cells in rows)) for cell in cells)
    most = max(1, (width - max(len(name) for name, _ in rows)) // column_width)
    size = -(-len(devices) // -(-len(devices) // most))
    for start in range(0, len(devices), size):
        part = slice(start, start + size)
        columns = (("category", "left"), *((heading, "right") for heading in headings[part]))
        yield plain("")
        yield table("Ledger", columns, ((name, *cells[part]) for name, cells in rows))


def _process_tables(processes: Sequence[Document], width: int) -> Iterator[Text]:
    rows = rows_of({"processes": processes})
    yield plain("Processes", "bold")
    if width >= _ONE_TABLE_WIDTH:
        yield from _lines((*_NAMES, *_MEMORY, *_STATE), rows, width)
    else:
        yield from _lines((*_NAMES, *_STATE), processes, width)
        on_devices = [row for row in rows if row["gpu"] or row["uuid"]]
        if on_devices:
            yield from (plain(""), plain("Process memory", "bold"))
            yield from _lines(("pid", *_MEMORY), on_devices, width)
    for row in rows:
        place = f"pid {row['pid']} {row['workload'] or ''}".rstrip() + f" on GPU {row['gpu'] or row['uuid']}"
        if row["unmapped_bytes"]:  # no device has this memory
            yield plain(f"{place}: {human_bytes(row['unmapped_bytes'])} unmapped (sleeping)")
        if row["nccl_bytes"] is not None and row["non_torch_bytes"] is not None:
            rest = human_bytes(row["non_torch_bytes"] - row["nccl_bytes"])
            yield plain(f"{place}: non-torch is NCCL {human_bytes(row['nccl_bytes'])}, CUDA context and other {rest}")


def _lines(names: Sequence[str], rows: Sequence[Document], width: int) -> Iterator[Text]:
    return Layout(chosen(PROCESS_COLUMNS, *names), rows, width).lines(rows)


def _clears(process: Document) -> bool:
    actions = process.get("actions")
    return not actions or "empty_cache" in actions


def _lacks_reclaimable(device: Document) -> bool:
    """Whether it is unknown how much of the device's cache a clear would free."""
    reserved, allocated = device.get("reserved_bytes"), device.get("allocated_bytes")
    return device.get("reclaimable_bytes") is None and reserved is not None and reserved > (allocated or 0)
