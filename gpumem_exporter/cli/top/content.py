"""The parts of the screen of `top`, as text; `top --once` prints them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpumem_client.wire.http import shown_url
from gpumem_client.wire.units import counted, human_seconds
from gpumem_exporter.cli.render.columns import DEVICE_COLUMNS, PROCESS_COLUMNS, legend
from gpumem_exporter.cli.render.event_table import event_table
from gpumem_exporter.cli.render.layout import Layout
from gpumem_exporter.cli.render.node_tables import DEMO_NOTICE, NO_PROCESS, clear_summary, errors_of
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.source import Reading
from gpumem_exporter.cli.top.view import View

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

_PRINTED_EVENTS = 10


def header(reading: Reading, age_seconds: float, *, lost: bool = False) -> Text:
    """Return the first line: where the values are from, and their age."""
    line = plain("gpumem-exporter top", "bold").append("  ")
    line.append_text(plain(shown_url(reading.url) if reading.url else "NVML alone")).append("  ")
    if lost:
        return line.append("no answer", style="bold red")
    processes = counted(len({row["pid"] for row in reading.rows}), "process", "processes")
    return line.append(f"{processes}, {human_seconds(max(0.1, age_seconds))} ago")


def warnings(reading: Reading) -> Iterator[Text]:
    """Yield the lines below the header: what is wrong with the node."""
    if not reading.url:
        yield plain("NVML ALONE: no exporter answers; the use inside of processes is not known", "bold yellow")
        yield plain(reading.without_exporter, "yellow")
    if reading.node.devices.get("source") == "demo":
        yield plain(DEMO_NOTICE, "bold yellow")
    for error in errors_of(reading.node.devices):
        yield plain(error, "bold red")


def lost_lines(reading: Reading, age_seconds: float, reason: str) -> Iterator[Text]:
    """Yield what is shown instead of values that are no longer valid."""
    source = "EXPORTER" if reading.url else "EXPORTER AND DRIVER"
    yield plain(f"LOST {source} {human_seconds(age_seconds)} ago; trying again", "bold red")
    yield plain(reason, "red")
    yield plain("")
    yield plain("Waiting for the next valid reading.")


def device_lines(reading: Reading, width: int) -> Iterator[Text]:
    """Yield a heading, a line for each device, and the legend of their bars."""
    devices = reading.devices
    if devices:
        yield from Layout(DEVICE_COLUMNS, devices, width, compact=True).lines(devices)
        yield legend(devices)
    elif any(errors_of(reading.node.devices)):
        yield plain("No device is known.", "dim")
    else:
        yield plain("No device matches." if reading.target.given() else "No device.", "dim")


def process_layout(reading: Reading, view: View, width: int) -> Layout:
    """Return the columns of processes."""
    return Layout(PROCESS_COLUMNS, reading.rows, width, compact=True, keep=view.column)


def no_rows(reading: Reading, view: View) -> str:
    """Return why no row is listed."""
    return "No process matches." if view.text or reading.target.given() else NO_PROCESS


def no_events(reading: Reading) -> str:
    """Return why no event is listed."""
    if not reading.url:
        return "Events need an exporter, and no exporter answers."
    if reading.events is not None:
        return "No event matches." if reading.target.given() else "The exporter has recorded no event yet."
    reason = reading.no_events or "waiting for the events"
    return f"{reason[0].upper()}{reason[1:].rstrip('.')}."


def summary(reading: Reading) -> str:
    """Return how much memory a clear would free."""
    if not reading.url:
        return "Without an exporter, the memory that a clear would free is unknown."
    return clear_summary(reading.node.processes.get("processes") or [])


def once(reading: Reading, view: View, width: int) -> Iterator[RenderableType]:
    """Yield the output of `top --once`: every device, every row, and the last events."""
    yield header(reading, 0.0)
    yield from warnings(reading)
    yield from device_lines(reading, width)
    rows = view.rows(reading.rows)
    yield from process_layout(reading, view, width).lines(rows, view.column, view.mark)
    if not rows:
        yield plain(no_rows(reading, view))
    yield plain("")
    if reading.events:
        yield event_table(reading.events, reading.taken_unix_seconds, most=_PRINTED_EVENTS)
        yield plain("")
    yield plain(summary(reading), "bold")
