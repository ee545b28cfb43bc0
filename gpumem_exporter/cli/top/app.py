"""The screen of the live `top`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.live import LiveApp
from gpumem_exporter.cli.render.event_table import event_table
from gpumem_exporter.cli.render.layout import Layout
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.cli.top import content
from gpumem_exporter.cli.top.clearing import Clearing
from gpumem_exporter.cli.top.content import SORTS, View
from gpumem_exporter.cli.top.source import Reading

_HELP = (
    ("arrows, j k", "select a process; it stays selected when the order changes"),
    ("space, pages", "next and previous page; g and G: first and last"),
    ("s S", "sort by the next or the previous column; a click on a heading sorts by it"),
    ("r", "reverse the order"),
    ("/", "filter: words in pid, workload, command, user, pod or state"),
    ("c", "clear the job of the selected process, after a question"),
    ("e", "switch between events and processes"),
    ("escape", "back to the processes; clear the filter"),
    ("q, Ctrl-C", "quit; Ctrl-Z: suspend"),
    ("", ""),
    ("allocated", "in tensors"),
    ("idle cache", "cache that was not needed for a minute: a clear frees it for good"),
    ("reclaimable", "cache that a clear would free now"),
    ("fragmented", "cache that a clear cannot free"),
    ("10 min", "the highest use in each part; blank without a reading"),
    ("allocatable", "what another process can get after a clear: free and idle cache"),
    ("non-torch", "used minus reserved: CUDA context, NCCL, libraries"),
    ("unmapped", "in PyTorch's reserved, but not held by the driver: sleeping"),
    ("age", "age of the process' last report"),
    ("-", "unknown. K, M, G are KiB, MiB, GiB"),
)
_QUESTION_SECONDS = 30.0
"""After this time the sizes in the question are too old for an answer."""
_SCROLLBAR_WIDTH = 1
_LONG_PAGE = 20
"""The number of lines for processes and events from which the events always get a quarter. With fewer lines, events
use only the lines that the processes leave free."""


def _keys(down: str, up: str, first: str, last: str) -> list[BindingType]:
    """Return the keys of `less` for actions of a list."""
    keys = {"j": down, "k": up, "space": "page_down", "g,home": first, "G,end": last}
    return [Binding(key, action, show=False) for key, action in keys.items()]


class ProcessTable(DataTable[Text]):
    """The rows of processes. The selected process stays selected when the order changes."""

    BINDINGS: ClassVar[list[BindingType]] = _keys("cursor_down", "cursor_up", "scroll_top", "scroll_bottom")

    def __init__(self) -> None:
        super().__init__(cursor_type="row", cell_padding=0)
        self._listed: list[Mapping[str, Any]] = []
        self._columns: list[tuple[Text, int]] = []
        """The headings and their widths."""
        self._chosen: tuple[object, object] | None = None
        """The pid and the uuid of the row that the user has selected."""
        self._placed = 0
        """Where the cursor was after the last `show`."""

    @property
    def selected(self) -> Mapping[str, Any] | None:
        """The row under the cursor."""
        return self._listed[self.cursor_row] if self.cursor_row < len(self._listed) else None

    def show(self, layout: Layout, rows: list[Mapping[str, Any]], view: View) -> None:
        """Show rows. Only the cells that differ are drawn again, and the list stays where it was scrolled to."""
        place = self.cursor_row
        if place != self._placed and self.selected is not None:  # the user has moved the cursor
            self._chosen = (self.selected["pid"], self.selected["uuid"])
        headings = layout.heading(view.column, view.mark)
        columns = [(heading, width) for heading, (_, width) in zip(headings, layout.columns, strict=True)]
        moved = columns != self._columns
        if moved:
            self._columns = columns
            self.clear(columns=True)
            for heading, (column, width) in zip(headings, layout.columns, strict=True):
                self.add_column(heading, width=width + 1, key=column.name)
        while self.row_count > len(rows):
            self.remove_row(self.ordered_rows[-1].key)
        for index, row in enumerate(rows):
            cells = layout.cells(row)
            if index >= self.row_count:
                self.add_row(*cells)
                continue
            for position, (old, new) in enumerate(zip(self.get_row_at(index), cells, strict=True)):
                if old != new:
                    self.update_cell_at(Coordinate(index, position), new)
        self._listed = rows
        known = [index for index, row in enumerate(rows) if (row["pid"], row["uuid"]) == self._chosen]
        # After the selected process exits, the next one is selected.
        self._placed = known[0] if known else max(0, min(place, len(rows) - 1))
        self.move_cursor(row=self._placed, scroll=moved)
        if not known and self._chosen is not None:
            self._chosen = (rows[self._placed]["pid"], rows[self._placed]["uuid"]) if rows else None


class Events(VerticalScroll):
    """The last events."""

    BINDINGS: ClassVar[list[BindingType]] = _keys("scroll_down", "scroll_up", "scroll_home", "scroll_end")

    def __init__(self) -> None:
        super().__init__()
        self.text = Static()

    def compose(self) -> ComposeResult:
        yield self.text


class Question(ModalScreen[bool]):
    """A question at the bottom of the screen. Any key except `y` is a no."""

    DEFAULT_CSS = """
    Question, Help { align: left bottom; background: transparent; }
    Question Static { text-style: bold reverse; }
    """

    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def compose(self) -> ComposeResult:
        yield Static(plain(self._text))

    def on_mount(self) -> None:
        self.set_timer(_QUESTION_SECONDS, self.action_no)

    def action_no(self) -> None:  # a timer would wait for the result of a lambda
        self.dismiss(False)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.dismiss(event.key in ("y", "Y"))


class Help(ModalScreen[None]):
    """The keys and the words. Any key returns."""

    def compose(self) -> ComposeResult:
        yield Static(table("", (("any key returns", "left"), ("", "wrap")), _HELP))

    def on_key(self, event: events.Key) -> None:
        event.stop()
        self.dismiss()


class NodeTop(LiveApp[Reading]):
    """Devices, processes and events of one node. `open_api` returns the API of the exporter at an address."""

    CSS = """
    * { scrollbar-size-vertical: 1; }
    #header, #warnings, #devices Static { text-wrap: nowrap; text-overflow: ellipsis; }
    #devices { height: auto; max-height: 50%; }
    ProcessTable { height: 1fr; min-height: 4; overflow-x: hidden; }
    ProcessTable > .datatable--cursor { text-style: reverse; background: ansi_default; color: ansi_default; }
    ProcessTable > .datatable--header { background: ansi_default; }
    #filter { height: 1; border: none; padding: 0; }
    #summary, #note { text-style: bold; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("question_mark", "help", "help"),
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", "reverse"),
        Binding("slash", "filter", "filter"),
        Binding("c", "clear", "clear"),
        Binding("e", "events", "events"),
        Binding("escape", "leave", show=False),
    ]

    def __init__(
        self,
        read: Callable[[], Reading],
        first: Reading,
        view: View,
        *,
        interval_seconds: float,
        open_api: Callable[[str], ExporterApi],
    ) -> None:
        super().__init__(read, first, interval_seconds=interval_seconds)
        self.view = view
        self._old_filter = view.text
        self._shows_events = False
        """The events replace the processes."""
        self._header, self._warnings = Static(id="header"), Static(id="warnings")
        self._devices, self._processes = Static(), ProcessTable()
        self._events, self._summary = Events(), Static(id="summary")
        self._shown_events: object = None
        self._filter = Input(placeholder="words to filter by", id="filter")
        self._note, self._noted = Static(id="note"), ""
        self._clearing = Clearing(open_api, lambda text: self.push_screen_wait(Question(text)), self.note)

    def compose(self) -> ComposeResult:
        yield self._header
        yield self._warnings
        with VerticalScroll(id="devices", can_focus=False):
            yield self._devices
        yield self._processes
        yield self._events
        yield self._summary
        yield self._filter
        yield self._note
        yield Footer()

    def on_mount(self) -> None:
        self._note.display = False
        self._filter.value = self.view.text
        self._filter.display = bool(self.view.text)
        self._processes.focus()

    def show(self) -> None:
        """Draw the reading, or that it is no longer valid."""
        reading, lost, width = self.reading, self.lost, self.size.width
        above = content.lost_lines(reading, self.age_seconds, lost) if lost else content.warnings(reading)
        self._update(self._header, [content.header(reading, self.age_seconds, lost=bool(lost))])
        self._update(self._warnings, list(above))
        self._processes.display = not (lost or self._shows_events)
        for part in (self._devices, self._events, self._summary):
            part.display = not lost
        if lost:
            return
        self._update(self._devices, list(content.device_lines(reading, width - _SCROLLBAR_WIDTH)))
        rows = self.view.rows(reading.rows)
        layout = content.process_layout(reading, self.view, width - _SCROLLBAR_WIDTH)
        self._processes.show(layout, rows, self.view)
        self._summary.update(plain(content.summary(reading) if rows else content.no_rows(reading, self.view)))
        self._show_events(len(rows), alone=self._shows_events)

    def note(self, text: str, seconds: float | None = None) -> None:
        """Show a message at the bottom, for some seconds or until the next one."""
        self._noted = text
        self._note.update(plain(text))
        self._note.display = bool(text)
        if seconds is not None:
            self.set_timer(seconds, lambda: self.note("") if self._noted == text else None)

    def check_action(self, action: str, _parameters: tuple[object, ...]) -> bool | None:
        """Whether a key has its function: keys for processes have none while the processes are not shown."""
        return not self._shows_events or action not in ("sort", "reverse", "filter", "clear")

    def action_help(self) -> None:
        self.push_screen(Help())

    def action_sort(self, step: int) -> None:
        self._look(replace(self.view, sort=SORTS[(SORTS.index(self.view.sort) + step) % len(SORTS)], reverse=False))

    def action_reverse(self) -> None:
        self._look(replace(self.view, reverse=not self.view.reverse))

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sort by the column whose heading is clicked; reverse the order if it is the sort column."""
        sort = str(event.column_key.value).replace(" ", "-")
        if sort == self.view.sort:
            self.action_reverse()
        elif sort in SORTS:
            self._look(replace(self.view, sort=sort, reverse=False))

    def action_filter(self) -> None:
        """Let the user type a filter, which applies at once."""
        self._old_filter = self.view.text
        self._filter.display = True
        self._filter.focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._look(replace(self.view, text=event.value))

    def on_input_submitted(self) -> None:
        self._filter.display = bool(self._filter.value)
        self._processes.focus()

    def action_clear(self) -> None:
        """Clear the job of the selected process after a question, or cancel a clear that waits."""
        url = "" if self.lost else self.reading.url
        self.run_worker(self._clearing.clear_or_cancel(self._processes.selected, url))

    def action_events(self) -> None:
        self._shows_events = not self._shows_events
        self.show()
        (self._events if self._shows_events else self._processes).focus()

    def action_leave(self) -> None:
        """Return to the processes, restore the previous filter, or clear the filter."""
        if self._shows_events:
            self.action_events()
        else:
            self._filter.value = self._old_filter if self._filter.has_focus else ""
            self.on_input_submitted()

    def _look(self, view: View) -> None:
        self.view = view
        self.show()

    def _update(self, part: Static, lines: list[Text]) -> None:
        part.update(Text("\n", no_wrap=True, overflow="ellipsis").join(lines))
        part.display = bool(lines)

    def _show_events(self, processes: int, *, alone: bool) -> None:
        reading = self.reading
        page = self._processes.size.height + self._events.size.height
        room = max(page - processes - 2, page // 4 if page >= _LONG_PAGE else 0)
        lines = min(room, len(reading.events or ()) + 1)
        self._events.display = alone or lines >= 2
        self._events.styles.height = "1fr" if alone else lines
        shown = (reading.events, reading.no_events, alone, lines)
        if self._events.display and shown != self._shown_events:
            self._shown_events = shown
            most = None if alone else lines - 1
            text = (
                event_table(reading.events, reading.taken_unix_seconds, most=most, wrap=alone)
                if reading.events
                else plain(content.no_events(reading), "dim")
            )
            self._events.text.update(text)
