"""The screen of `top` and `fleet top`: findings, jobs and devices."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from rich.table import Table
from rich.text import Text
from rich.traceback import Traceback
from textual import events, on, work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.actions.action_options import MAX_DEADLINE_SECONDS
from gpumem_exporter.actions.sentences import sentence
from gpumem_exporter.cli.action_dialog import act
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.program import INTERRUPTED, in_daemon_thread, one_line, replace_missing_characters
from gpumem_exporter.cli.render.action_tables import reasons
from gpumem_exporter.cli.render.columns import DEVICES, FINDINGS, JOBS
from gpumem_exporter.cli.render.layout import Row
from gpumem_exporter.cli.render.node_tables import BY_GPU, View, called, heading, rows_of
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.cli.top.detail import Detail, DetailScreen
from gpumem_exporter.cli.top.tables import RowTable
from gpumem_exporter.page.words import WORDS

Reading = tuple[list[Node], Sequence[str]]
"""Nodes, each with the reason why its values are no longer current, and warnings."""

_KEYS = (
    ("arrows, j k", "select a row, which stays selected when the order changes"),
    ("tab", "go to the next table: findings, devices, jobs"),
    ("enter", "show the job or the device: timeline, processes, memory, events; a second click does the same"),
    ("space a", "show the processes of the job or of all jobs, or hide them"),
    ("/ f", "filter every table: only jobs with every word, and their devices and findings; escape clears the filter"),
    ("s", "sort the table by the next column; a click on a heading sorts by it"),
    ("r", "reverse the order"),
    ("c", "clear the job, after a question"),
    ("q, Ctrl-C", "quit; Ctrl-Z: suspend"),
    ("-  ≥", "unknown; a lower bound. K, M and G are KiB, MiB and GiB"),
    ("█ ▒ ░ ·", "a device: used by a job, its idle cache, used by no job, free"),
)
_WHEN = {"step": "It clears at the end of a step. ", "idle": "It clears when it is idle. "}
# If a reading takes longer than this, its values are no longer current.
_LATE_SECONDS = 4.0
# After this time the sizes in the question are too old for an answer.
_QUESTION_SECONDS = 30.0
_SHOWN_SECONDS = 15.0
# The number of lines from which more findings are shown, and the number from which the past is.
_TALL, _VERY_TALL = 30, 45


class Question(ModalScreen[bool]):
    """A question at the bottom of the screen, or a text that any key ends. Any key except `y` is a no."""

    DEFAULT_CSS = """
    Question { align: left bottom; background: transparent; }
    """

    def __init__(self, shown: Text | Table, seconds: float | None = None) -> None:
        super().__init__()
        self._shown, self._seconds = shown, seconds

    def compose(self) -> ComposeResult:
        yield Static(self._shown)

    def on_mount(self) -> None:
        if self._seconds is not None:
            self.set_timer(self._seconds, self.action_no)

    def action_no(self) -> None:  # a timer would wait for the result of a lambda
        self.dismiss(False)

    def on_key(self, event: events.Key) -> None:
        event.stop()
        if self.is_current:  # a second key may arrive before the screen is gone
            self.dismiss(event.key in ("y", "Y"))


class Top(App[None]):
    """Findings, jobs and devices of nodes, which a thread reads again and again, because `read` may block.

    `open_api` returns the API of the exporter at an address.
    """

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    * { scrollbar-size-vertical: 1; }
    #header { text-wrap: nowrap; text-overflow: ellipsis; height: 1; }
    RowTable { overflow-x: hidden; background: ansi_default; }
    #jobs { height: 1fr; min-height: 4; }
    #devices { height: auto; max-height: 40%; }
    RowTable > .datatable--cursor { background: ansi_default; color: ansi_default; text-style: reverse; }
    RowTable > .datatable--header { background: ansi_default; }
    #words { height: 1; border: none; padding: 0; }
    Screen > Detail { height: 16; padding-top: 1; }
    Toast { width: 100%; max-width: 100%; margin: 0; padding: 0 1; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
        Binding("slash,f", "ask_words", "filter"),
        Binding("c", "clear", "clear"),
        Binding("question_mark", "help", "help"),
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
        super().__init__()
        self.theme = "ansi-dark"  # the terminal's own colors
        self.interval_seconds = interval_seconds
        self.ended: int | None = None
        """The signal that ended the program; None for `q`."""
        self.nodes, self._warnings = first
        self._read, self._open_api = read, open_api
        self._header = Static(id="header")
        self._findings = RowTable(FINDINGS, id="findings")
        self._devices = RowTable(DEVICES, BY_GPU, id="devices")
        self._jobs = RowTable(JOBS, view.order, id="jobs")
        # The last hour of the row with this key, on a screen with the lines for it.
        self._past, self._past_of = Detail(open_api, span=1, brief=True), ("", "")
        # The filter. Shown while it has words or the user types them.
        self._first_words = view.text
        self._words = Input(id="words", placeholder="words to filter by", select_on_focus=False)
        # Cancels the clear that runs; None while none does.
        self._stopped: threading.Event | None = None

    def compose(self) -> ComposeResult:
        yield from (self._header, self._findings, self._devices, self._jobs, self._past, self._words, Footer())

    def on_mount(self) -> None:
        self._words.value = self._first_words  # only a running application takes a value
        self._jobs.focus()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        # After Ctrl-Z the terminal's screen is empty, and Textual draws only what changes.
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh(layout=True))
        self._watch()
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    def action_interrupt(self) -> None:  # Textual reads Ctrl-C as a key, not as a signal
        self._end(signal.SIGINT)

    def run_to_end(self) -> int:
        """Run until the user quits, and return the exit code. SIGTERM and SIGHUP end this process."""
        for name in ("COLUMNS", "LINES"):
            # Textual prefers them to the terminal's size, and they do not change with the window.
            os.environ.pop(name, None)
        replace_missing_characters(sys.stderr)  # Textual writes to stderr
        self.run()
        if self.ended is None:
            return self.return_code or 0
        if self.ended == signal.SIGINT:
            return INTERRUPTED
        _die(self.ended)
        return 128 + self.ended

    def _fatal_error(self) -> None:
        # Textual would print the local variables of each frame, and a token may be among them.
        self.panic(Traceback(width=None))

    def _end(self, number: int) -> None:
        if number == signal.SIGHUP and not os.isatty(0):
            _die(number)  # the terminal is closed: Textual would wait for its output
        self.ended = number
        self.exit()

    @work
    async def _watch(self) -> None:
        while True:
            start = time.monotonic()
            reading = asyncio.ensure_future(in_daemon_thread(self._read))
            while not (await asyncio.wait({reading}, timeout=_LATE_SECONDS))[0]:
                self._lose(f"no answer for {time.monotonic() - start:.0f} s")
            try:
                self.nodes, self._warnings = reading.result()
                self.show()
            except GpumemError as error:
                self._lose(str(error))
            await asyncio.sleep(start + self.interval_seconds - time.monotonic())

    def _lose(self, reason: str) -> None:
        self.nodes = [replace(node, error=reason) for node in self.nodes]
        self.show()

    def show(self) -> None:
        """Draw the last values; dimmed where they are no longer current."""
        width = self.size.width - 1  # a scroll bar
        self._header.update(heading(self.nodes))
        findings, devices, jobs = rows_of(self.nodes, self._words.value, self._warnings)
        # The slot keeps its height, so that nothing below moves when a finding comes or goes.
        self._findings.styles.height = 6 if self.size.height >= _TALL else 4
        self._findings.show(findings, width)
        self._devices.show(devices, width)
        self._jobs.show(jobs, width)
        self._words.display = bool(self._words.value) or self._words.has_focus
        self._show_past()

    @on(DataTable.RowHighlighted)
    @on(events.DescendantFocus)
    def _show_past(self) -> None:
        self._past.display = self.size.height >= _VERY_TALL
        row = self._table.selected if self.screen_stack else None  # no screen: it ends
        if row and self._past.display and row["key"][:2] != self._past_of and (row["job"] or "memory" in row):
            self._past_of = row["key"][:2]
            self._past.follow(row["job"] or row, partial(self._node_of, row))

    def _node_of(self, row: Row) -> Node:
        """Return the node of a row as it is now."""
        return next((node for node in self.nodes if node.name == row["node"]), row["from"])

    def note(self, text: str, seconds: float = _SHOWN_SECONDS) -> None:
        """Show a message at the bottom of any screen for some seconds, instead of the last one."""
        self.clear_notifications()
        if text:
            self.notify(one_line(text), timeout=seconds, markup=False)

    @property
    def _table(self) -> RowTable:
        return self.focused if isinstance(self.focused, RowTable) else self._jobs

    def action_help(self) -> None:
        rows = [*_KEYS, ("", ""), *((word["label"], word["help"]) for word in WORDS.values())]
        self.push_screen(Question(table("", (("any key returns", "left"), ("", "wrap")), dict.fromkeys(rows))))

    def on_data_table_row_selected(self) -> None:
        """Show the device of the selected row, or the job of a finding or a process."""
        row = self._table.selected
        if row is None:
            return
        node = partial(self._node_of, row)

        def clear(job: Row) -> None:
            self._clear(called(job), job["clear"], node())

        if self._table is self._devices:
            self.push_screen(DetailScreen(row, node, self._open_api))
        elif row["job"] is not None:
            self.push_screen(DetailScreen(row["job"], node, self._open_api, clear))

    def action_ask_words(self) -> None:
        """Let the user type words to filter by, which apply at once."""
        self._words.display = True
        self._words.focus()

    def on_input_changed(self) -> None:
        self.show()

    def on_input_submitted(self) -> None:
        """Return to the jobs."""
        self._jobs.focus()
        self.call_after_refresh(self.show)

    def action_leave(self) -> None:
        """Clear the filter, and return to the jobs."""
        self._words.value = ""
        self.on_input_submitted()

    def action_clear(self) -> None:
        """Clear the job of the selected row after a question, or cancel a clear that waits."""
        row = self._table.selected
        if row is None or row.get("job") is None:
            self.note("Select a job to clear.")
        elif self._table is self._findings and row["clear"]:  # the job that should clear, not the job that lacks memory
            self._clear(row["clear"]["name"], row["clear"], row["from"])
        else:
            self._clear(called(row["job"]), row["job"]["clear"], row["from"])

    @work
    async def _clear(self, name: str, clear: Row | None, node: Node) -> None:
        """Ask whether to clear a job, and clear it after a yes, one job at a time. `clear` is the exporter's proposal.

        If a clear waits for the end of a step or for an engine, cancel that clear instead.
        """
        if self._stopped is not None:
            self._stopped.set()
            return
        stopped = self._stopped = threading.Event()
        named = one_line(f"{name} on {node.name}" if node.name else name)
        try:
            self.note(await self._cleared(named, clear, "" if node.error else node.url, stopped))
        finally:
            self._stopped = None

    async def _cleared(self, name: str, clear: Row | None, url: str, stopped: threading.Event) -> str:
        """Ask and clear. Return the note about the result; empty if the answer is no."""
        if not url:
            return "A clear needs an exporter, and no exporter answers."
        if clear is None:
            return f"{name} has no idle cache that a clear frees for good."
        timing = _WHEN.get(clear["mode"], "")
        question = plain(f"Clear {name}? {clear['sentence']} {timing}y/n", "bold reverse")
        if not await self.push_screen_wait(Question(question, _QUESTION_SECONDS)):
            return ""
        self.note(f"Clearing {name} …")
        body = {"action": "empty_cache", "target": clear["target"], "reason": "requested in top"}
        loop = asyncio.get_running_loop()

        def say(text: str) -> None:
            loop.call_soon_threadsafe(self.note, f"{text} c cancels.", MAX_DEADLINE_SECONDS)

        def run() -> str:
            with self._open_api(url) as api:
                action = act(api, body, say=say, stopped=stopped.is_set)
            return " ".join(reasons(action["results"])) or sentence(action)

        try:
            return await in_daemon_thread(run)
        except GpumemError as error:
            return str(error)


def _die(number: int) -> None:
    """End this process by a signal."""
    # The sender, such as a shell, then sees that the signal ended it.
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
