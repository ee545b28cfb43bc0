"""Draws the whole screen of `top` as lines, from the values and the view. Pure."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_client.wire.http import shown_url
from gpumem_client.wire.units import human_seconds
from gpumem_exporter.cli.render.node_tables import DEMO_NOTICE, clear_summary, driver_error
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.cells import beside, cell, line
from gpumem_exporter.cli.top.clearing import Note
from gpumem_exporter.cli.top.device_lines import device_lines, legend
from gpumem_exporter.cli.top.event_lines import events_alone, events_below, last_events
from gpumem_exporter.cli.top.process_lines import process_lines
from gpumem_exporter.cli.top.rows import descends
from gpumem_exporter.cli.top.source import Reading
from gpumem_exporter.cli.top.view import View

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Display", "Frame", "draw", "print_lines"]

_LEAST_WIDTH, _LEAST_HEIGHT = 72, 12
_HEADER_WIDTH = 120
"""The width of the header in output without a width."""
_REASON_LINES = 5
_MIN_ROWS = 5
"""The rows of processes that the devices leave space for."""
_PRINTED_EVENTS = 10
_WIDE_FOOTER = 100
_NOTE_LINES = 4

_HELP = (
    ("arrows, j k", "select a process; it stays selected when the order changes"),
    ("space, pages", "next and previous page; g and G: first and last"),
    ("s S", "sort by the next or the previous column"),
    ("r", "reverse the order"),
    ("/", "filter: words in pid, workload, command, user, pod or state"),
    ("c", "clear the job of the selected process, after a question"),
    ("e", "switch between events and processes"),
    ("escape", "clear the selection, then the filter"),
    ("q, Ctrl-C", "quit; Ctrl-Z: suspend"),
    ("", ""),
    ("allocated", "in tensors"),
    ("idle-cache", "cache that was not needed for a minute: a clear frees it for good"),
    ("reclaimable", "cache that a clear would free now"),
    ("fragmented", "cache that a clear cannot free"),
    ("10 min", "the highest use in each part; blank without a reading"),
    ("allocatable", "what another process can get after a clear: free and idle cache"),
    ("non-torch", "used minus reserved: CUDA context, NCCL, libraries"),
    ("unmapped", "in PyTorch's reserved, but not held by the driver: sleeping"),
    ("age", "age of the process' last report"),
    ("-", "unknown. K, M, G are KiB, MiB, GiB"),
)


@dataclass(frozen=True, slots=True)
class Display:
    """The values to show."""

    reading: Reading
    age_seconds: float
    """Seconds since the last answer."""
    lost: str = ""
    """Why the reading is no longer valid; empty while it is."""
    note: Note | None = None


@dataclass(frozen=True)
class Frame:
    """A drawn screen."""

    lines: list[Text]
    page: int
    """The number of lines for processes or events."""
    view: View
    """The view with valid positions."""


def draw(display: Display, view: View, width: int, height: int) -> Frame:
    """Return exactly `height` lines of at most `width` columns. A terminal that is too small gets a message."""
    if width < _LEAST_WIDTH or height < _LEAST_HEIGHT:
        message = f"too small: {width}x{height}; needs {_LEAST_WIDTH}x{_LEAST_HEIGHT}"
        return Frame(_filled([cell(message, max(1, width))], height), 0, view)
    lines = [_header(display, width), *_banners(display, width)]
    page, position = 0, ""
    if view.shows_help:
        lines += [line([cell(keys, 12, style="bold"), plain(meaning)], width, gap="  ") for keys, meaning in _HELP]
    elif display.lost:
        lines += [plain(""), plain("Waiting for the next valid reading.")]
    else:
        lines += _devices(display.reading, width, height - len(lines) - _MIN_ROWS - 5)
        page = height - len(lines) - 3
        if view.shows_events:
            body, view, position = events_alone(display.reading, view, width, page)
        else:
            body, page, view, position = _processes(display.reading, view, width, page)
        lines = [*_filled([*lines, *body], height - 2), cell(_clear_summary(display.reading), width, style="bold")]
    footer = _footer(display, view, position, width)
    return Frame([*_filled(lines, height)[: height - len(footer)], *footer], page, view)


def print_lines(reading: Reading, view: View, width: int) -> list[Text]:
    """Return the lines of `top --once`: every device, every row, no keys."""
    display = Display(reading, 0.0)
    listed = view.rows(reading.rows)
    lines = [_header(display, min(width, _HEADER_WIDTH)), *_banners(display, width)]
    lines += _devices(reading, width, 1 << 30)
    lines += process_lines(listed, listed, view, width)
    lines += [] if listed else [plain(_nothing(reading, view))]
    events = last_events(reading, width, _PRINTED_EVENTS)
    lines += [plain(""), *events, plain("")] if events else []
    return [*lines, plain(_clear_summary(reading), "bold")]


def _filled(lines: list[Text], height: int) -> list[Text]:
    return [*lines[:height], *(plain("") for _ in range(height - len(lines)))]


def _header(display: Display, width: int) -> Text:
    reading = display.reading
    left = plain("").append("gpumem-exporter top", style="bold").append("  ")
    left.append_text(plain(shown_url(reading.url) if reading.url else "NVML alone"))
    processes = len({row.pid for row in reading.rows})
    counted = f"{processes} process{'' if processes == 1 else 'es'}"
    right = "no answer" if display.lost else f"{counted}, {human_seconds(max(0.1, display.age_seconds))} ago"
    return beside(left, plain(right, "bold red" if display.lost else ""), width)


def _banners(display: Display, width: int) -> list[Text]:
    """The warnings below the header."""
    reading = display.reading
    banners: list[tuple[str, str]] = []
    if display.lost:
        source = "EXPORTER" if reading.url else "EXPORTER AND DRIVER"
        banners.append((f"LOST {source} {human_seconds(display.age_seconds)} ago; trying again", "bold red"))
        banners += [(part, "red") for part in textwrap.wrap(display.lost, width)[:_REASON_LINES]]
    else:
        if not reading.url:
            banners.append(("NVML ALONE: no exporter answers; the use inside of processes is not known", "bold yellow"))
            banners.append((reading.without_exporter, "yellow"))
        if reading.devices.get("source") == "demo":
            banners.append((DEMO_NOTICE, "bold yellow"))
        if error := driver_error(reading.devices):
            banners.append((error, "bold red"))
    return [cell(text, width, style=style) for text, style in banners]


def _devices(reading: Reading, width: int, max_devices: int) -> list[Text]:
    """The lines of the devices, and the legend or a blank line."""
    devices = reading.devices.get("devices") or []
    drawn = device_lines(devices, reading.past, reading.read_seconds, width, max_devices=max_devices)
    if drawn:
        return [*drawn, legend(devices, width) or plain("")]
    if driver_error(reading.devices):
        return [plain("No device is known.", "dim")]
    return [plain("No device matches." if reading.target.given() else "No device.", "dim")]


def _processes(reading: Reading, view: View, width: int, page: int) -> tuple[list[Text], int, View, str]:
    """The processes and the events below them.

    Returns:
        The lines, the number of lines for processes, the view with valid positions, and the range of shown processes.
    """
    listed = view.rows(reading.rows)
    below = events_below(reading, width, page, max(1, len(listed)))
    page -= len(below)
    view = view.settle(listed, page)
    lines = process_lines(reading.rows, listed[view.first : view.first + page], view, width)
    lines += [] if listed else [plain(_nothing(reading, view), "dim")]
    last = min(len(listed), view.first + page)
    position = f"{view.first + 1}-{last} of {len(listed)}" if page and listed else ""
    return [*_filled(lines, page + 1), *below], page, view, position


def _nothing(reading: Reading, view: View) -> str:
    return (
        "No process matches."
        if view.text or reading.target.given()
        else "There is no process on a device, and no process that reports."
    )


def _clear_summary(reading: Reading) -> str:
    if not reading.url:
        return "Without an exporter, the memory that a clear would free is unknown."
    return clear_summary(reading.processes.get("processes") or [])


def _footer(display: Display, view: View, position: str, width: int) -> list[Text]:
    """The last line, or a note in several lines, which cover the lines above it."""
    if display.note is not None:
        style = "bold reverse" if display.note.asks else "bold"
        wrapped = textwrap.wrap(display.note.text, width, max_lines=_NOTE_LINES, placeholder=" …")
        return [cell(text, width, style=style) for text in wrapped] or [plain("")]
    return [_key_line(view, position, width)]


def _key_line(view: View, position: str, width: int) -> Text:
    if view.typing is not None:
        hint = plain("enter applies, escape cancels", "dim")
        return beside(plain(f"/{view.text[2 - width :]}", "bold").append("_", style="blink"), hint, width)
    if view.shows_help:
        return plain("any key returns", "dim")
    if view.shows_events:
        return beside(plain("q quit  ? help  arrows scroll  e processes", "dim"), plain(position), width)
    wide = width >= _WIDE_FOOTER
    keys = f"q quit  ? help  s sort  {'r reverse  ' if wide else ''}/ filter  c clear  e events"
    order = f"{view.sort} {'descending' if descends(view.sort, reverse=view.reverse) else 'ascending'}"
    filter_text = f"/{view.text}" if view.text else ""
    right = "  ".join(filter(None, (filter_text, order if wide else "", position)))
    return beside(plain(keys, "dim"), plain(right), width)
