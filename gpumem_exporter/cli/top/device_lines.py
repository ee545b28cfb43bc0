"""The devices of `top`: one line for each, with the ledger as a bar and as sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_exporter.cli.render.ledger_bar import SEGMENTS, Segment, bar_lengths
from gpumem_exporter.cli.render.node_tables import device_name
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.cells import cell, line, width_of
from gpumem_exporter.cli.top.history import Past
from gpumem_exporter.cli.top.scarce import scarce_style
from gpumem_exporter.cli.top.sparkline import WIDTHS, sparkline
from gpumem_exporter.units import UNKNOWN, human_ratio, short_bytes

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["device_lines", "legend"]

Device = Mapping[str, Any]

_WIDE = 120
"""From this width, each part of the bar has a column with its size, and the headings are the legend."""
_BUSY_WIDTH, _SIZE_WIDTH = 5, 6
_NAME_WIDTHS = (16, 28)
"""The longest shown name, on a narrow and on a wide screen."""
_FULL_NAME_REST = 180
"""A name is not cut if this number of columns is left beside it."""
_LONGEST_BAR = 100
_PAST_HEADING = "in use, 10 min"
_MAKER = "NVIDIA "
_RECLAIMABLE = SEGMENTS[1]
_SHORTEST_BARS = (20, 12)
"""The shortest bar beside the last ten minutes, on a narrow and on a wide screen."""
_DRIVER_SEGMENTS: tuple[Segment, ...] = (
    Segment("used", ("used",), "█", "#", "blue"),
    Segment("reserved by the driver", ("reserved",), "░", "-", "magenta"),
    SEGMENTS[-1],
)
"""The parts of the bar without an exporter."""


def device_lines(
    devices: Sequence[Device], past: Past, now: float, width: int, *, unicode_output: bool, max_devices: int
) -> list[Text]:
    """Return a heading and a line for each device; empty if there is no device.

    Args:
        devices: from `/api/v1/devices`.
        past: the last ten minutes of the devices, shown if there is space.
        now: the end of these ten minutes, by the clock of `past`.
        width: the columns of the screen.
        unicode_output: whether the terminal shows more than ASCII.
        max_devices: the number of lines. If there are more devices, the last line has their number.
    """
    if not devices or max_devices <= 0:
        return []
    wide = width >= _WIDE and _with_ledgers(devices)
    gpu_width = width_of((_gpu(device) for device in devices), 3)
    name_width = width_of(map(_name, devices), 6)
    if width - name_width < _FULL_NAME_REST:
        name_width = min(name_width, _NAME_WIDTHS[wide])
    headings = _size_headings(devices, wide, unicode_output)
    size_widths = [max(_SIZE_WIDTH if not wide else 0, heading.cell_len) for heading in headings]
    room = width - (gpu_width + name_width + _BUSY_WIDTH + sum(size_widths) + 3 + len(size_widths))
    past_width = _past_width(room, wide) if unicode_output and _has_past(devices, past) else 0
    bar_width = max(8, min(_LONGEST_BAR, room - (past_width + 1 if past_width else 0)))

    def build_line(first: Sequence[Text], sizes: Sequence[Text]) -> Text:
        sized = [cell(value, size, right=True) for value, size in zip(sizes, size_widths, strict=True)]
        return line([*first, *sized], width)

    lines = [
        build_line(
            [
                cell("gpu", gpu_width, style="bold"),
                cell("device", name_width, style="bold"),
                cell("busy", _BUSY_WIDTH, right=True, style="bold"),
                *([cell(_PAST_HEADING, past_width, style="bold")] if past_width else []),
                cell("memory", bar_width, style="bold"),
            ],
            headings,
        )
    ]
    shown = devices if len(devices) <= max_devices else devices[: max_devices - 1]
    for device in shown:
        first = [
            cell(_gpu(device), gpu_width),
            cell(_name(device), name_width, ellipsis=unicode_output),
            cell(human_ratio(device.get("utilization_ratio")), _BUSY_WIDTH, right=True),
        ]
        if not device.get("up", True):
            why = plain(device.get("error") or "does not answer", "bold red")
            lines.append(line([*first, cell(why, width - sum(c.cell_len + 1 for c in first))], width))
        else:
            if past_width:
                total_bytes = (device.get("memory") or {}).get("total_bytes")
                first.append(sparkline(past.get(device.get("uuid") or "", ()), total_bytes, past_width, now))
            bar = _bar(device, bar_width, unicode_output)
            lines.append(build_line([*first, bar], _sizes(device, wide, _with_ledgers(devices))))
    if len(shown) < len(devices):
        lines.append(plain(f"and {len(devices) - len(shown)} more devices: a taller screen or --gpu shows them", "dim"))
    return lines


def legend(devices: Sequence[Device], width: int, *, unicode_output: bool) -> Text | None:
    """Return the meaning of the bars' characters; None if the headings show it."""
    if not devices or (width >= _WIDE and _with_ledgers(devices)):
        return None
    parts = SEGMENTS if _with_ledgers(devices) else _DRIVER_SEGMENTS
    return line([_key(segment, unicode_output) for segment in parts], width, gap="  ")


def _has_past(devices: Sequence[Device], past: Past) -> bool:
    """Whether a device has more than one point."""
    return any(len(past.get(device.get("uuid") or "", ())) > 1 for device in devices)


def _past_width(room: int, wide: bool) -> int:
    """The width of the last ten minutes; 0 if the bar needs the space."""
    for width in WIDTHS:
        bar = room - width - 1
        if bar >= _SHORTEST_BARS[wide] and bar * 5 >= width * 4:
            return width
    return 0


def _with_ledgers(devices: Sequence[Device]) -> bool:
    return any(device.get("ledger") for device in devices)


def _key(segment: Segment, unicode_output: bool) -> Text:
    key = plain(segment.character if unicode_output else segment.ascii_character, segment.style)
    return key.append(f" {segment.name}", style="")


def _size_headings(devices: Sequence[Device], wide: bool, unicode_output: bool) -> list[Text]:
    if wide:
        return [*(_key(segment, unicode_output) for segment in SEGMENTS), plain("total", "bold")]
    reclaim = [plain("reclaim", f"bold {_RECLAIMABLE.style}")] if _with_ledgers(devices) else []
    return [plain("used", "bold"), *reclaim, plain("free", "bold"), plain("total", "bold")]


def _sizes(device: Device, wide: bool, with_ledgers: bool) -> list[Text]:
    memory = device.get("memory") or {}
    ledger = device.get("ledger") or {}
    if wide:
        *sizes, free = (_size(ledger, segment) for segment in SEGMENTS)
    else:
        sizes = [memory.get("used_bytes"), *([_size(ledger, _RECLAIMABLE)] if with_ledgers else [])]
        free = memory.get("free_bytes")
    total = memory.get("total_bytes")
    return [*(plain(short_bytes(size)) for size in sizes), _free(free, total), plain(short_bytes(total))]


def _free(free: int | None, total: int | None) -> Text:
    return plain(short_bytes(free), scarce_style(free, total))


def _size(ledger: Mapping[str, int], segment: Segment) -> int | None:
    known = [ledger[category] for category in segment.categories if category in ledger]
    return sum(known) if known else None


def _bar(device: Device, width: int, unicode_output: bool) -> Text:
    ledger, segments = device.get("ledger"), SEGMENTS
    if not ledger:
        memory = device.get("memory") or {}
        ledger = {name: memory.get(f"{name}_bytes") or 0 for name in ("used", "reserved", "free")}
        segments = _DRIVER_SEGMENTS
    drawn = plain("")
    for segment, length in zip(segments, bar_lengths(ledger, width, segments), strict=True):
        drawn.append((segment.character if unicode_output else segment.ascii_character) * length, style=segment.style)
    return cell(drawn or plain(UNKNOWN), width)


def _gpu(device: Device) -> str:
    return device.get("gpu") or UNKNOWN


def _name(device: Device) -> str:
    return device_name(device).removeprefix(_MAKER)
