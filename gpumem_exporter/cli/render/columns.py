"""The columns of devices and of processes, which `info`, `top` and `fleet` share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, human_ratio, human_seconds
from gpumem_exporter.cli.render.bars import (
    DRIVER_SEGMENTS,
    SEGMENTS,
    draw_bar,
    draw_past,
    key_of,
    scarce_style,
    segments_of,
)
from gpumem_exporter.cli.render.layout import Column
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.core.ledger import sum_of_known

if TYPE_CHECKING:
    from rich.text import Text

Document = Mapping[str, Any]

ROW_FIELDS = (
    *("pid", "gpu", "uuid", "workload", "rank", "command", "user", "k8s_namespace", "k8s_pod", "state"),
    *("used_bytes", "allocated_bytes", "reserved_bytes", "idle_cache_bytes", "reclaimable_bytes", "fragmented_bytes"),
    *("non_torch_bytes", "nccl_bytes", "unmapped_bytes", "step", "sample_age_seconds", "actions"),
)
"""The fields of a row in `top --once --json`, in order."""


def rows_of(processes: Document) -> tuple[Document, ...]:
    """Return a row for each process on each device of `/api/v1/processes`. A process without a device has one row."""
    rows = []
    nowhere: Document = {}
    for process in processes.get("processes") or ():
        for device in process.get("devices") or (nowhere,):
            both = {"actions": [], **process, **device}
            rows.append({name: both.get(name) for name in ROW_FIELDS})
    return tuple(rows)


def device_name(device: Document) -> str:
    """Return the name with the MIG profile, unless the name has the profile already; a dash if unknown."""
    name, profile = device.get("name") or "", device.get("mig_profile") or ""
    return (name if profile in name else f"{name} {profile}".lstrip()).removeprefix("NVIDIA ") or UNKNOWN


def legend(devices: Iterable[Document]) -> Text:
    """Return the meaning of the characters in the bars of devices."""
    ledgers = [device["ledger"] for device in devices if device.get("ledger")]
    return plain("  ").join(map(key_of, segments_of(ledgers) if ledgers else DRIVER_SEGMENTS))


def _at(path: str) -> Callable[[Document], Any]:
    """Return a function that reads a value in nested documents, such as `memory.free_bytes`; None if it is unknown."""
    names = path.split(".")

    def value(row: Document) -> Any:
        found: Any = row
        for name in names:
            found = (found or {}).get(name)
        return found

    return value


def _text(path: str) -> Callable[[Document], str | None]:
    value = _at(path)
    return lambda row: None if value(row) in (None, "") else str(value(row))


def _part(path: str) -> Callable[[Document], int | str]:
    """Return a function that reads a size that few rows have: blank for 0 and for an unknown size."""
    value = _at(path)
    return lambda row: value(row) or ""


def _gpu(row: Document) -> str | None:
    return row.get("gpu") or row.get("uuid")


def _draw_memory(device: Document, width: int) -> Text:
    ledger = device.get("ledger")
    drawn = draw_bar(ledger, width) if ledger else draw_bar(device.get("memory") or {}, width, DRIVER_SEGMENTS)
    return drawn or plain(UNKNOWN)


def _draw_past(device: Document, width: int) -> Text:
    return draw_past(device.get("past", ()), device.get("now", 0.0), _at("memory.total_bytes")(device), width)


def _pressure_style(device: Document) -> str:
    """Return the style for the share of the usable memory that is free or reclaimable: see docs/numbers.md."""
    ledger, total = device.get("ledger") or {}, _at("memory.total_bytes")(device)
    if "free" not in ledger or total is None:
        return ""
    usable = total - ledger.get("driver_reserved", 0)
    return scarce_style(ledger["free"] + ledger.get("torch_reclaimable", 0), usable)


def _other(device: Document) -> int | None:
    ledger = device.get("ledger") or {}
    return sum_of_known([ledger.get(category) for category in SEGMENTS[3].categories])


DEVICE_COLUMNS = (
    Column("gpu", _gpu, left=True, cut=8),
    Column("device", device_name, left=True, cut=16),
    Column("busy", lambda device: human_ratio(device.get("utilization_ratio")), least=5),
    Column(
        "in use, 10 min",
        lambda device: "shown" if len(device.get("past", ())) > 1 else None,
        *(3, True),
        sparse=True,
        draw=_draw_past,
        least=15,
        most=60,
    ),
    Column("memory", lambda _: "", left=True, draw=_draw_memory, least=20, most=40),
    Column("used", _at("memory.used_bytes"), least=6),
    Column("free", _at("memory.free_bytes"), least=6, cell_style=_pressure_style),
    Column("allocatable", _at("allocatable_bytes"), 1, sparse=True),
    Column("allocated", _at("ledger.torch_allocated"), 5, sparse=True, style="green"),
    Column("idle cache", _at("idle_cache_bytes"), 2, sparse=True, style="yellow"),
    Column("reclaimable", _at("ledger.torch_reclaimable"), sparse=True, short="reclaim", style="yellow"),
    Column("fragmented", _at("ledger.torch_fragmented"), 4, sparse=True, style="red"),
    Column("other", _other, 6, sparse=True, style="blue"),
    Column("total", _at("memory.total_bytes"), least=6),
)
"""Rows are documents of `/api/v1/devices`; for the last ten minutes with `past` and `now` of `bars.draw_past`."""


def _workload(row: Document) -> str | None:
    """The workload; without one, the program in brackets."""
    command = row.get("command")
    return row.get("workload") or (f"({command})" if command else None)


def _age(row: Document) -> str:
    """The age of the last sample, at least 0.1 seconds."""
    age = row.get("sample_age_seconds")
    return human_seconds(None if age is None else max(0.1, age))


def _pod(row: Document) -> str | None:
    return "/".join(filter(None, (row.get("k8s_namespace"), row.get("k8s_pod")))) or None


def _state_style(row: Document) -> str:
    return {"silent": "red", "unreported": "dim"}.get(row.get("state") or "", "")


def _process_column(name: str, value: Callable[[Document], int | str | None], rank: int = 0, **more: Any) -> Column:
    return Column(name, value, rank, cell_style=_state_style, **more)


PROCESS_COLUMNS = (
    _process_column("pid", _text("pid"), cut=12),
    _process_column("gpu", _gpu, left=True, cut=8),
    _process_column("workload", _workload, left=True, cut=12),
    _process_column("rank", _text("rank")),
    _process_column("user", _text("user"), 5, left=True, cut=12),
    _process_column("used", _at("used_bytes"), least=6),
    _process_column("allocated", _at("allocated_bytes"), short="alloc", least=6, style="green"),
    _process_column("reserved", _at("reserved_bytes"), 4),
    _process_column("idle cache", _at("idle_cache_bytes"), short="idle", least=6, style="yellow"),
    _process_column("reclaimable", _at("reclaimable_bytes"), short="reclaim", style="yellow"),
    _process_column("fragmented", _at("fragmented_bytes"), short="frag", least=6, style="red"),
    _process_column("non-torch", _at("non_torch_bytes"), style="blue"),
    _process_column("NCCL", _part("nccl_bytes"), 2, style="blue", sparse=True),
    _process_column("unmapped", _part("unmapped_bytes"), 1, sparse=True),
    _process_column("age", _age, 3, least=6),
    _process_column("step", _text("step"), 8),
    _process_column("state", _text("state"), 7, left=True, least=10),
    _process_column("command", _text("command"), 6, left=True, cut=20),
    _process_column("pod", _pod, 9, left=True, cut=20),
)
"""Rows are those of `rows_of`."""
