"""What `top` shows: the order and filter of its rows, and the parts of its screen, which `top --once` prints."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.http import shown_url
from gpumem_client.wire.units import counted, human_seconds
from gpumem_exporter.cli.render.columns import DEVICE_COLUMNS, PROCESS_COLUMNS, legend
from gpumem_exporter.cli.render.event_table import event_table
from gpumem_exporter.cli.render.layout import Layout
from gpumem_exporter.cli.render.node_tables import DEMO_NOTICE, NO_PROCESS, clear_summary, errors_of
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.source import Reading

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

Row = Mapping[str, Any]

_PRINTED_EVENTS = 10
_FILTERED = ("pid", "uuid", "workload", "command", "user", "k8s_namespace", "k8s_pod", "state")


def _number(text: object) -> tuple[tuple[int, str], ...]:
    """A sort key: `10` after `9`, `0:10` after `0:9`, and numbers before other texts."""
    parts = str(text).replace("@", ":").split(":")
    return tuple((int(part), "") if part.isascii() and part.isdecimal() else (1 << 62, part) for part in parts)


_NAMES: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: (row["workload"].casefold(), _number(row["rank"])) if row["workload"] else None,
    "gpu": lambda row: None if row["gpu"] is None else _number(row["gpu"]),
    "pid": lambda row: _number(row["pid"]),
}
_SIZES = {
    column.name.replace(" ", "-"): column
    for column in PROCESS_COLUMNS
    if column.name in ("used", "allocated", "reserved", "idle cache", "reclaimable", "fragmented", "non-torch")
}
SORTS = (*_SIZES, *_NAMES)
"""The sort columns. Sizes are sorted from the largest, names from the smallest."""


@dataclass(frozen=True, slots=True)
class View:
    """What the user of `top` has chosen to see."""

    text: str = ""
    """The filter: words that the names in a row must contain."""
    sort: str = "used"
    reverse: bool = False

    @property
    def column(self) -> str:
        """The name of the sort column."""
        return _SIZES[self.sort].name if self.sort in _SIZES else self.sort

    @property
    def mark(self) -> str:
        """The direction of the order, beside the heading of the sort column."""
        return "▼" if self._descends else "▲"

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that pass the filter, in order. Rows without a value come last; equal rows are by pid."""
        value: Callable[[Row], Any] = _SIZES[self.sort].value if self.sort in _SIZES else _NAMES[self.sort]
        passing = [row for row in rows if self._passes(row)]
        passing.sort(key=lambda row: (_number(row["pid"]), _number(row["gpu"])))
        known = [row for row in passing if value(row) is not None]
        known.sort(key=value, reverse=self._descends)
        return [*known, *(row for row in passing if value(row) is None)]

    @property
    def _descends(self) -> bool:
        return (self.sort in _SIZES) is not self.reverse

    def _passes(self, row: Row) -> bool:
        """Return whether the names in a row contain every word of the filter. Case is ignored."""
        names = "\n".join(str(row[name]) for name in _FILTERED if row[name] is not None).casefold()
        return all(word in names for word in self.text.casefold().split())


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
