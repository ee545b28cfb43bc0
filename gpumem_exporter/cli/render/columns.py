"""The columns of devices and of processes, which `info`, `top` and `fleet` share, and the bars in them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, human_ratio, human_seconds
from gpumem_exporter.cli.render.layout import Column
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.core.ledger import sum_of_known

if TYPE_CHECKING:
    from rich.text import Text

Document = Mapping[str, Any]

PAST_SECONDS = 600.0
_LEVELS = "▁▂▃▄▅▆▇█"
_SCARCE = ((0.05, "bold red"), (0.1, "bold yellow"))
"""The style if less than this share of the memory is available. The live page and the dashboards have these limits."""

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


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of the bar: its name in the legend, its categories, and its character."""

    name: str
    categories: tuple[str, ...]
    character: str
    style: str


SEGMENTS: tuple[Segment, ...] = (
    Segment("allocated", ("torch_allocated",), "█", "green"),
    Segment("reclaimable", ("torch_reclaimable",), "▓", "yellow"),
    Segment("fragmented", ("torch_fragmented",), "▒", "red"),
    Segment("other", ("non_torch", "other_processes", "driver_reserved", "unattributed"), "░", "blue"),
    Segment("free", ("free",), "·", "dim"),
)
"""From left to right."""
DRIVER_SEGMENTS: tuple[Segment, ...] = (
    Segment("used", ("used_bytes",), "█", "blue"),
    Segment("reserved by the driver", ("reserved_bytes",), "░", "magenta"),
    Segment("free", ("free_bytes",), "·", "dim"),
)
"""The parts of the bar without an exporter: there is no ledger."""
_CACHE = Segment("cache, may be released", ("torch_fragmented",), "▒", "red")


def segments_of(ledgers: Iterable[Mapping[str, int]]) -> tuple[Segment, ...]:
    """Return the segments with names that are true for ledgers."""
    caches = [ledger for ledger in ledgers if ledger.get("torch_fragmented")]
    if not caches or any("torch_reclaimable" in ledger for ledger in caches):
        return SEGMENTS
    # cudaMallocAsync does not know how much of its cache a clear releases, so its cache is not called fragmented.
    return tuple(_CACHE if segment.categories == _CACHE.categories else segment for segment in SEGMENTS)


def key_of(segment: Segment) -> Text:
    """Return a segment's character and name."""
    return plain("").append(segment.character, style=segment.style).append(f" {segment.name}")


def draw_bar(sizes: Mapping[str, int | None], width: int, segments: Sequence[Segment] = SEGMENTS) -> Text:
    """Return the bar of some categories; empty if all sizes are 0."""
    drawn = plain("")
    for segment, length in zip(segments, bar_lengths(sizes, width, segments), strict=True):
        drawn.append(segment.character * length, style=segment.style)
    return drawn


def bar_lengths(sizes: Mapping[str, int | None], width: int, segments: Sequence[Segment] = SEGMENTS) -> tuple[int, ...]:
    """Return the number of characters of each segment, by largest remainder; they add up to `width`.

    A segment with a negative sum gets none: non-torch and unattributed are signed.
    """
    sums = [max(0, sum(sizes.get(category) or 0 for category in segment.categories)) for segment in segments]
    total = sum(sums)
    if total == 0:
        return tuple(0 for _ in segments)
    lengths = [size * width // total for size in sums]
    by_remainder = sorted(range(len(sums)), key=lambda i: (-(sums[i] * width % total), i))
    for i in by_remainder[: width - sum(lengths)]:
        lengths[i] += 1
    return tuple(lengths)


def draw_past(points: Sequence[tuple[float, int]], now: float, total_bytes: int | None, width: int) -> Text:
    """Return the highest use in each of `width` parts of the ten minutes before `now`, scaled to `total_bytes`.

    A point has the seconds by the clock of `now`, and the bytes in use. A part without a point is blank, a part without
    use is the lowest block. A part that was nearly full has the color of scarce memory.
    """
    if not total_bytes:
        return plain("")
    part_seconds = PAST_SECONDS / width
    # The parts are aligned with the clock, so that the line moves to the left and a part keeps its height.
    last = now // part_seconds
    highest: dict[int, int] = {}
    for seconds, in_use in points:
        position = width - 1 - int(last - seconds // part_seconds)
        highest[position] = max(in_use, highest.get(position, 0))
    drawn = plain("")
    for position in range(width):
        in_use = highest.get(position, -1)
        if in_use < 0:
            drawn.append(" ")
            continue
        level = max(1, min(len(_LEVELS), round(in_use * len(_LEVELS) / total_bytes)))
        drawn.append(_LEVELS[level - 1], style=scarce_style(total_bytes - in_use, total_bytes) or "dim")
    return drawn


def scarce_style(available: float | None, total: float | None) -> str:
    """Return the style of memory of which `available` bytes are left; empty if that is enough or unknown."""
    if available is None or total is None:
        return ""
    return next((style for part, style in _SCARCE if available < part * total), "")


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
"""Rows are documents of `/api/v1/devices`; for the last ten minutes with `past` and `now` of `draw_past`."""


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
"""`rows_of` makes the rows."""
