"""What the screens of a job and of a device in `top` share: they read the past and the events, and draw all of it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.live import in_daemon_thread
from gpumem_exporter.cli.node import Node, read_live
from gpumem_exporter.cli.render.event_table import event_line
from gpumem_exporter.cli.render.rows import Row, as_of
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.plot import legend, timeline

_SPANS = (("10 min", 600), ("1 h", 3600), ("6 h", 21600), ("24 h", 86400))
_REFRESH_SECONDS = 2.0
_EVENTS, _POINTS = 50, 2000
_MARKS = {"oom": ("!", "bold red"), "action": ("c", "bold yellow")}
"""The character of an event on the timeline, and its style."""


class DetailScreen(ModalScreen[None]):
    """A part of a node, read again every two seconds. `node` returns the node as it is now.

    `query` selects the part in the history and the events; `details` is the part of `/api/v1/live` that has all values.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "back"),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", key_display="+"),
        Binding("minus", "zoom(1)", "zoom out", key_display="-"),
    ]
    DEFAULT_CSS = """
    DetailScreen { background: ansi_default; }
    DetailScreen VerticalScroll { height: 1fr; }
    """

    def __init__(
        self,
        node: Callable[[], Node],
        open_api: Callable[[str], ExporterApi],
        *,
        query: str,
        details: str = "none",
    ) -> None:
        super().__init__()
        self._node, self._open_api = node, open_api
        self._query, self._details = query, details
        self._span = 0
        self._live: Row | None = None
        """The node, with all values of `details`; None until it is read."""
        self._history: Mapping[str, Any] | None = None
        self._events: Sequence[Mapping[str, Any]] = ()
        self._problem = self._noted = ""
        self._body = Static()
        self._due = asyncio.Event()

    @abstractmethod
    def heading(self, live: Row, now: float) -> tuple[Text, str]:
        """Return the first line, and why the part is no longer there; empty while it is."""

    @abstractmethod
    def findings(self, live: Row) -> Iterable[Text]:
        """Return what needs attention."""

    @abstractmethod
    def tables(self, live: Row, width: int) -> Iterable[RenderableType]:
        """Return what is below the timeline."""

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._body
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.run_worker(self._watch())

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Draw what was read last."""
        self._body.update(Group(*self._parts(self._node(), self.size.width - 1)))

    def note(self, text: str) -> None:
        """Show a message below the findings, until the next one."""
        self._noted = text
        self.show()

    def action_zoom(self, step: int) -> None:
        self._span = max(0, min(len(_SPANS) - 1, self._span + step))
        self._history = None
        self.show()
        self._due.set()

    async def _watch(self) -> None:
        while True:
            node, span = self._node(), self._span
            try:
                read = await in_daemon_thread(partial(self._read, node, _SPANS[span][1]))
                if span == self._span:
                    self._live, self._history, self._events = read
                self._problem = ""
            except GpumemError as error:
                self._problem = str(error)
            self.show()
            try:
                await asyncio.wait_for(self._due.wait(), _REFRESH_SECONDS)
            except asyncio.TimeoutError:
                continue
            self._due.clear()

    def _read(
        self, node: Node, seconds: float
    ) -> tuple[Row | None, Mapping[str, Any] | None, Sequence[Mapping[str, Any]]]:
        if not node.url:
            return None, None, ()
        with self._open_api(node.url) as api:
            live = read_live(api, self._details)
            now = live["time"]["unix_seconds"]
            past = api.get(f"/api/v1/history?{self._query}&from={now - seconds:.0f}&to={now:.0f}&points={_POINTS}")
            events = api.get(f"/api/v1/events?{self._query}&limit={_EVENTS}&fold=true")["events"]
        return live, past, events

    def _parts(self, node: Node, width: int) -> Iterator[RenderableType]:
        live: Row = self._live or node.live or {}
        now = live["time"]["unix_seconds"]
        title, gone = self.heading(live, now)
        name = plain(f"{node.name}  ".lstrip(), "bold").append_text(title)
        yield name.append(f"  as of {as_of(live)}" if node.error else f"  {gone}" if gone else "", style="bold red")
        yield from self.findings(live)
        if self._noted:
            yield plain(self._noted, "bold")
        yield plain("")
        yield from self._past(live["words"], width)
        yield plain("")
        yield from self.tables(live, width)
        if self._events:
            yield from (plain(""), plain("Events", "bold"))
            newest_first = sorted(self._events, key=lambda event: -float(event["unix_seconds"]))
            yield from (event_line(event, now, width) for event in newest_first)

    def _past(self, words: Row, width: int) -> Iterator[Text]:
        span = _SPANS[self._span][0]
        if self._history is None:
            needs = "" if self._node().url else "The past needs an exporter, and no exporter answers."
            yield plain(self._problem or needs or f"Reading the last {span} …", "dim")
            return
        marks = [(event["unix_seconds"], *_MARKS[event["type"]]) for event in self._events if event["type"] in _MARKS]
        yield from timeline(self._history, width, max(4, min(16, self.size.height // 3)), marks)
        line = legend(words).append(f"last {span}", style="bold").append("  ! out of memory  c action" if marks else "")
        yield line.append_text(plain(f"  {self._problem}", "red"))


def finding_lines(rows: Iterable[Row]) -> Iterator[Text]:
    """Yield a line for each finding."""
    for row in rows:
        yield plain(f"{row['mark']:2} {row['since']} {row['sentence']}", row["style"])
