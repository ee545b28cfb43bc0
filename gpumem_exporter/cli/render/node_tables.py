"""The tables of `info`, from the documents of `/api/v1/devices` and `/api/v1/processes`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, counted, human_bytes, human_ratio, human_seconds
from gpumem_exporter.cli.render.ledger_bar import draw_bar, key_of, segments_of
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.core.ledger import CATEGORIES

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

__all__ = [
    "DEMO_NOTICE",
    "WORTH_SAYING",
    "cache_sentence",
    "clear_summary",
    "device_name",
    "driver_error",
    "errors_of",
    "node_tables",
]

Document = Mapping[str, Any]

DEMO_NOTICE = "DEMO: simulated devices and processes"

WORTH_SAYING = 0.05
"""The share of what a clear would free from which the summary says that it would be reserved again."""
_BAR_WIDTH = 24
_ONE_TABLE_WIDTH = 150
"""The width from which the identity and the memory of a process fit in one row."""

_NO_DEVICE: tuple[Document, ...] = ({},)
_NAMES = (("pid", "right"), ("workload", "cut"), ("rank", "right"))
_STATE = (("command", "cut"), ("state", "left"), ("age", "right"))
_SIZES = ("used", "allocated", "reserved", "idle cache", "reclaimable", "fragmented", "non-torch")
_MEMORY = (("gpu", "left"), *((name, "right") for name in _SIZES))


def node_tables(devices: Document, processes: Document, *, width: int) -> Iterator[RenderableType]:
    """Yield all that `info` shows, from top to bottom, for a terminal of `width` columns."""
    if devices.get("source") == "demo":
        yield plain(DEMO_NOTICE, "bold yellow")
    listed = devices.get("devices") or []
    if listed:
        columns = (("gpu", "left"), ("name", "cut"), ("total", "right"), ("busy", "right"), ("memory", "left"))
        yield table("Devices", columns, map(_device_row, listed))
        yield plain("  ").join(map(key_of, segments_of(device.get("ledger") or {} for device in listed)))
    for error in errors_of(devices):
        yield plain(error, "bold red")
    known = [device for device in listed if device.get("ledger")]
    if known:
        yield from _ledger_tables(known, width)
        yield from map(plain, _space_lines(known))
    yield plain("")
    running = processes.get("processes") or []
    if running:
        yield from _process_tables(running, one_table=width >= _ONE_TABLE_WIDTH)
        yield from _unmapped(running)
        yield from map(plain, _nccl_lines(running))
    else:
        yield plain("There is no process on a device, and no process that reports.")
    yield plain("")
    yield plain(clear_summary(running), "bold")


def cache_sentence(idle: int | None, reclaimable: int, unknown: int) -> str:
    """Return the idle cache and what a clear would free now, without a period at the end.

    Args:
        idle: the sum of the known values; None without any.
        reclaimable: what a clear would free.
        unknown: the part of it without a known idle cache.
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
    able = [process for process in processes if process.get("reporting") and _clears(process)]
    if not able:
        return "A clear would free nothing: no process accepts this action."
    devices = [device for process in able for device in process.get("devices") or ()]
    known = [
        [device["reclaimable_bytes"] for device in process.get("devices") or () if _has(device, "reclaimable_bytes")]
        for process in able
    ]
    if not any(known):
        return "It is not known how much memory a clear would free."
    total = sum(sum(sizes) for sizes in known)
    freeing = sum(1 for sizes in known if sum(sizes) > 0)
    hides = [any(map(_lacks_reclaimable, process.get("devices") or ())) for process in able]
    unknown = sum(1 for sizes, hidden in zip(known, hides, strict=True) if hidden or not sizes)
    idle = [device["idle_cache_bytes"] for device in devices if _has(device, "idle_cache_bytes")]
    unknown_idle = sum(
        device.get("reclaimable_bytes") or 0 for device in devices if not _has(device, "idle_cache_bytes")
    )
    sentence = cache_sentence(sum(idle) if idle else None, total, unknown_idle)
    where = f"in {freeing} of {counted(len(able), 'reporting process', 'reporting processes')}"
    return f"{sentence} ({where}; unknown for {unknown})." if unknown else f"{sentence} ({where})."


def errors_of(devices: Document) -> Iterator[str]:
    """Yield the error of the driver, and of each device that does not answer."""
    error = driver_error(devices)
    if error:
        yield error
    for device in devices.get("devices") or ():
        if not device.get("up", True):
            yield f"gpu {device['gpu'] or device['uuid']}: {device.get('error') or 'does not answer'}"


def driver_error(devices: Document) -> str:
    """Return why the exporter has no driver; empty if it has one."""
    nvml = devices.get("nvml") or {}
    return "" if nvml.get("up") else f"driver: {nvml.get('error') or 'not read yet'}"


def device_name(device: Document) -> str:
    """Return the name with the MIG profile, unless the name has the profile already; a dash if unknown."""
    name, profile = device.get("name") or "", device.get("mig_profile") or ""
    return (name if profile in name else f"{name} {profile}".lstrip()) or UNKNOWN


def _device_row(device: Document) -> tuple[str | Text, ...]:
    memory, ledger = device.get("memory") or {}, device.get("ledger")
    return (
        device.get("gpu") or UNKNOWN,
        device_name(device),
        human_bytes(memory.get("total_bytes")),
        human_ratio(device.get("utilization_ratio")),
        draw_bar(ledger, _BAR_WIDTH) if ledger else UNKNOWN,
    )


def _ledger_tables(devices: Sequence[Document], width: int) -> Iterator[RenderableType]:
    """A column for each device, in several tables of about equal size if the terminal is narrow."""
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


def _space_lines(devices: Sequence[Document]) -> Iterator[str]:
    """Yield the space for the next job on each device whose allocatable memory is known."""
    known = [device for device in devices if _has(device, "allocatable_bytes")]
    if known:
        yield ""
    for device in known:
        free, allocatable = device["ledger"].get("free"), device["allocatable_bytes"]
        name = device.get("gpu") or device.get("uuid") or UNKNOWN
        yield f"GPU {name}: {human_bytes(free)} free, {human_bytes(allocatable)} allocatable"


def _nccl_lines(processes: Sequence[Document]) -> Iterator[str]:
    """Yield the parts of the non-torch memory of each process whose NCCL bytes are known."""
    rows = [(process, device) for process in processes for device in process.get("devices") or ()]
    known = [row for row in rows if _has(row[1], "nccl_bytes") and _has(row[1], "non_torch_bytes")]
    if known:
        yield ""
    for process, device in known:
        nccl, non_torch = device["nccl_bytes"], device["non_torch_bytes"]
        parts = f"NCCL {human_bytes(nccl)}, CUDA context and other {human_bytes(non_torch - nccl)}"
        yield f"Non-torch of pid {process['pid']} on GPU {device.get('gpu') or device.get('uuid')}: {parts}"


def _process_tables(processes: Sequence[Document], *, one_table: bool) -> Iterator[RenderableType]:
    if one_table:
        rows = []
        for process in processes:
            names, state = _names(process), _state(process)
            rows += [(*names, *_memory(device), *state) for device in process.get("devices") or _NO_DEVICE]
        yield table("Processes", (*_NAMES, *_MEMORY, *_STATE), rows)
        return
    yield table("Processes", (*_NAMES, *_STATE), ((*_names(process), *_state(process)) for process in processes))
    rows = [(str(process["pid"]), *_memory(device)) for process in processes for device in process.get("devices") or ()]
    if rows:
        yield plain("")
        yield table("Process memory", (_NAMES[0], *_MEMORY), rows)


def _unmapped(processes: Sequence[Document]) -> Iterator[Text]:
    """Yield a line for each process on a device whose memory is unmapped: no device has it."""
    for process in processes:
        for device in process.get("devices") or ():
            if device.get("unmapped_bytes"):
                name = f"pid {process['pid']} {process.get('workload') or ''}".rstrip()
                gpu = device.get("gpu") or device.get("uuid") or UNKNOWN
                yield plain(f"{name}, gpu {gpu}: {human_bytes(device['unmapped_bytes'])} unmapped (sleeping)")


def _names(process: Document) -> tuple[str, ...]:
    return (str(process["pid"]), process.get("workload") or UNKNOWN, process.get("rank") or UNKNOWN)


def _state(process: Document) -> tuple[str | Text, ...]:
    state = str(process.get("state") or UNKNOWN)
    style = {"reporting": "green", "silent": "red"}.get(state, "dim")
    return process.get("command") or UNKNOWN, plain(state, style), human_seconds(process.get("sample_age_seconds"))


def _memory(device: Document) -> tuple[str, ...]:
    sizes = (device.get(f"{re.sub('[- ]', '_', name)}_bytes") for name in _SIZES)
    return (device.get("gpu") or device.get("uuid") or UNKNOWN, *map(human_bytes, sizes))


def _clears(process: Document) -> bool:
    actions = process.get("actions")
    return not actions or "empty_cache" in actions


def _lacks_reclaimable(device: Document) -> bool:
    """Whether it is unknown how much of the device's cache a clear would free."""
    reserved, allocated = device.get("reserved_bytes"), device.get("allocated_bytes")
    return not _has(device, "reclaimable_bytes") and reserved is not None and reserved > (allocated or 0)


def _has(device: Document, name: str) -> bool:
    return device.get(name) is not None
