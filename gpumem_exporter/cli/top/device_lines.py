"""The devices of `top`: one line for each, with its last ten minutes, the ledger as a bar, and sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, human_ratio, short_bytes
from gpumem_exporter.cli.render.ledger_bar import SEGMENTS, Segment, draw_bar, key_of, segments_of
from gpumem_exporter.cli.render.node_tables import device_name
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.cells import cell, line, scarce_style, width_of
from gpumem_exporter.cli.top.history import SPAN_SECONDS, Past, Point
from gpumem_exporter.core.ledger import sum_of_known

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["PAST_WIDTHS", "device_lines", "legend", "sparkline"]

Device = Mapping[str, Any]

_WIDE = 132
"""From this width, each part of the bar has a column with its size, and the headings are the legend."""
_ALLOCATABLE_WIDTH = 104
"""From this width, there is a column for the allocatable memory."""
_BUSY_WIDTH, _SIZE_WIDTH = 5, 6
_NAME_WIDTHS = (16, 28)
"""The longest shown name, on a narrow and on a wide screen."""
_FULL_NAME_REST = 180
"""A name may be longer if this number of columns is left beside it."""
_LONGEST_BAR = 100
_SHORTEST_BARS = (20, 12)
"""The shortest bar beside the last ten minutes, on a narrow and on a wide screen."""
PAST_WIDTHS = (60, 40, 30, 20, 15)
"""With these widths, a character of the last ten minutes is a whole number of seconds."""
_LEVELS = "▁▂▃▄▅▆▇█"
_RECLAIMABLE = SEGMENTS[1]
_DRIVER_SEGMENTS: tuple[Segment, ...] = (
    Segment("used", ("used",), "█", "blue"),
    Segment("reserved by the driver", ("reserved",), "░", "magenta"),
    SEGMENTS[-1],
)
"""The parts of the bar without an exporter."""


@dataclass(frozen=True, slots=True)
class _Size:
    """A column with a size."""

    heading: Text
    value: Callable[[Device], int | None]
    shows_pressure: bool = False
    """The size has the color of scarce memory if the device is nearly full."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The width of each column; `past` is 0 if it is not shown."""

    width: int
    wide: bool
    gpu: int
    name: int
    past: int
    bar: int
    sizes: Sequence[int]


def device_lines(devices: Sequence[Device], past: Past, now: float, width: int, *, max_devices: int) -> list[Text]:
    """Return a heading and a line for each device; empty if there is no device.

    Args:
        devices: from `/api/v1/devices`.
        past: the last ten minutes of the devices, shown if there is space.
        now: the end of these ten minutes, by the clock of `past`.
        width: the columns of the screen.
        max_devices: the number of lines. If there are more devices, the last line has their number.
    """
    if not devices or max_devices <= 0:
        return []
    columns = _size_columns(devices, width)
    layout = _layout(devices, past, width, [column.heading for column in columns])
    shown = devices if len(devices) <= max_devices else devices[: max_devices - 1]
    lines = [
        _heading(layout, [column.heading for column in columns]),
        *(_line(device, layout, columns, past.get(device.get("uuid") or "", ()), now) for device in shown),
    ]
    if len(shown) < len(devices):
        lines.append(plain(f"and {len(devices) - len(shown)} more devices: a taller screen or --gpu shows them", "dim"))
    return lines


def legend(devices: Sequence[Device], width: int) -> Text | None:
    """Return the meaning of the bars' characters; None if the headings show it."""
    if not devices or _is_wide(devices, width):
        return None
    segments = _segments(devices) if _with_ledgers(devices) else _DRIVER_SEGMENTS
    return line([key_of(segment) for segment in segments], width, gap="  ")


def sparkline(points: Sequence[Point], total_bytes: int | None, width: int, now: float) -> Text:
    """Return the highest use in each of `width` parts of the ten minutes before `now`, scaled to `total_bytes`.

    A part without a reading is blank. A part without use is the lowest block. The parts are aligned with the clock, so
    that the line moves to the left. A part that is nearly full has the color of scarce memory.
    """
    if not total_bytes:
        return plain(" " * width)
    part_seconds = SPAN_SECONDS / width
    last = now // part_seconds
    highest: dict[int, int] = {}
    for seconds, in_use in points:
        position = width - 1 - int(last - seconds // part_seconds)
        highest[position] = max(in_use, highest.get(position, 0))
    drawn = plain("")
    for position in range(width):
        if position not in highest:
            drawn.append(" ")
            continue
        eighths = max(1, min(len(_LEVELS), round(highest[position] * len(_LEVELS) / total_bytes)))
        drawn.append(_LEVELS[eighths - 1], style=scarce_style(total_bytes - highest[position], total_bytes) or "dim")
    return drawn


def _is_wide(devices: Sequence[Device], width: int) -> bool:
    return width >= _WIDE and _with_ledgers(devices)


def _with_ledgers(devices: Sequence[Device]) -> bool:
    return any(device.get("ledger") for device in devices)


def _layout(devices: Sequence[Device], past: Past, width: int, headings: Sequence[Text]) -> _Layout:
    wide = _is_wide(devices, width)
    gpu = width_of(map(_gpu, devices), 3)
    natural = width_of(map(_name, devices), 6)
    name = min(natural, max(_NAME_WIDTHS[wide], width - _FULL_NAME_REST))
    sizes = [max(0 if wide else _SIZE_WIDTH, heading.cell_len) for heading in headings]
    room = width - (gpu + name + _BUSY_WIDTH + sum(sizes) + 3 + len(sizes))
    past_width = 0
    if any(len(past.get(device.get("uuid") or "", ())) > 1 for device in devices):
        past_width = _past_width(room, wide)
    bar = max(8, min(_LONGEST_BAR, room - (past_width + 1 if past_width else 0)))
    return _Layout(width, wide, gpu, name, past_width, bar, sizes)


def _past_width(room: int, wide: bool) -> int:
    """The width of the last ten minutes; 0 if the bar needs the space."""
    for width in PAST_WIDTHS:
        bar = room - width - 1
        if bar >= _SHORTEST_BARS[wide] and bar * 5 >= width * 4:
            return width
    return 0


def _segments(devices: Sequence[Device]) -> tuple[Segment, ...]:
    return segments_of(device.get("ledger") or {} for device in devices)


def _size_columns(devices: Sequence[Device], width: int) -> list[_Size]:
    used, free, total = map(_of_memory, ("used_bytes", "free_bytes", "total_bytes"))
    last = [_Size(plain("total", "bold"), total)]
    if width >= _ALLOCATABLE_WIDTH and _with_ledgers(devices) and any(map(_allocatable, devices)):
        last.insert(0, _Size(plain("allocatable", "bold"), _allocatable))
    if _is_wide(devices, width):
        parts = [_Size(key_of(segment), partial(_sum_of, segment)) for segment in _segments(devices)[:-1]]
        return [*parts, _Size(key_of(SEGMENTS[-1]), free, shows_pressure=True), *last]
    reclaim = _Size(plain("reclaim", f"bold {_RECLAIMABLE.style}"), partial(_sum_of, _RECLAIMABLE))
    first = [_Size(plain("used", "bold"), used), *([reclaim] if _with_ledgers(devices) else [])]
    return [*first, _Size(plain("free", "bold"), free, shows_pressure=True), *last]


def _heading(layout: _Layout, sizes: Sequence[Text]) -> Text:
    return _columns(
        layout,
        [
            cell("gpu", layout.gpu, style="bold"),
            cell("device", layout.name, style="bold"),
            cell("busy", _BUSY_WIDTH, right=True, style="bold"),
            *([cell("in use, 10 min", layout.past, style="bold")] if layout.past else []),
            cell("memory", layout.bar, style="bold"),
        ],
        sizes,
    )


def _line(device: Device, layout: _Layout, columns: Sequence[_Size], points: Sequence[Point], now: float) -> Text:
    first = [
        cell(_gpu(device), layout.gpu),
        cell(_name(device), layout.name),
        cell(human_ratio(device.get("utilization_ratio")), _BUSY_WIDTH, right=True),
    ]
    if not device.get("up", True):
        why = plain(device.get("error") or "does not answer", "bold red")
        return cell(plain(" ").join([*first, why]), layout.width)
    memory = device.get("memory") or {}
    if layout.past:
        first.append(sparkline(points, memory.get("total_bytes"), layout.past, now))
    if device.get("ledger"):
        bar = draw_bar(device["ledger"], layout.bar)
    else:
        sizes = {name: memory.get(f"{name}_bytes") or 0 for name in ("used", "reserved", "free")}
        bar = draw_bar(sizes, layout.bar, _DRIVER_SEGMENTS)
    return _columns(
        layout, [*first, cell(bar or plain(UNKNOWN), layout.bar)], [_size(device, column) for column in columns]
    )


def _columns(layout: _Layout, first: Sequence[Text], sizes: Sequence[Text]) -> Text:
    sized = [cell(value, size, right=True) for value, size in zip(sizes, layout.sizes, strict=True)]
    return line([*first, *sized], layout.width)


def _size(device: Device, column: _Size) -> Text:
    style = _pressure_style(device) if column.shows_pressure else ""
    return plain(short_bytes(column.value(device)), style)


def _pressure_style(device: Device) -> str:
    """Return the style for the share of the usable memory that is free or reclaimable: see docs/numbers.md."""
    ledger, total = device.get("ledger") or {}, _of_memory("total_bytes")(device)
    if "free" not in ledger or total is None:
        return ""
    usable = total - ledger.get("driver_reserved", 0)
    return scarce_style(ledger["free"] + ledger.get("torch_reclaimable", 0), usable)


def _sum_of(segment: Segment, device: Device) -> int | None:
    ledger = device.get("ledger") or {}
    return sum_of_known([ledger.get(category) for category in segment.categories])


def _of_memory(name: str) -> Callable[[Device], int | None]:
    return lambda device: (device.get("memory") or {}).get(name)


def _allocatable(device: Device) -> int | None:
    return device.get("allocatable_bytes")


def _gpu(device: Device) -> str:
    return device.get("gpu") or UNKNOWN


def _name(device: Device) -> str:
    return device_name(device).removeprefix("NVIDIA ")
