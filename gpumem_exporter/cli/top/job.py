"""The screen of one job in `top`: its timeline, processes, components, phases and events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.text import Text
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from gpumem_client.wire.errors import GpumemError
from gpumem_client.wire.units import UNKNOWN, human_seconds, short_bytes
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.live import in_daemon_thread
from gpumem_exporter.cli.node import Node, read_live
from gpumem_exporter.cli.render.columns import JOBS, clock
from gpumem_exporter.cli.render.event_table import event_line
from gpumem_exporter.cli.render.layout import Layout
from gpumem_exporter.cli.render.rows import Row, as_of, rows_of
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.cli.top.plot import legend, timeline

_SPANS = (("10 min", 600), ("1 h", 3600), ("6 h", 21600), ("24 h", 86400))
_REFRESH_SECONDS = 2.0
_EVENTS, _POINTS = 50, 2000
_MARKS = {"oom": ("!", "bold red"), "action": ("c", "bold yellow")}
"""The character of an event on the timeline, and its style."""
_HIDDEN_COLUMNS = ("fold", "owner", "growth", "devices")


class JobScreen(ModalScreen[None]):
    """One job, read again every two seconds. `node` returns the job's node as it is now."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "back"),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", key_display="+"),
        Binding("minus", "zoom(1)", "zoom out", key_display="-"),
        Binding("c", "clear", "clear"),
    ]
    DEFAULT_CSS = """
    JobScreen { background: ansi_default; }
    JobScreen VerticalScroll { height: 1fr; }
    """

    def __init__(
        self, job: Row, node: Callable[[], Node], open_api: Callable[[str], ExporterApi], clear: Callable[[Row], None]
    ) -> None:
        super().__init__()
        self._job, self._node, self._open_api, self._clear = job, node, open_api, clear
        self._span = 0
        self._live: Row | None = None
        """The node, with all values of the job's processes; None until it is read."""
        self._history: Mapping[str, Any] | None = None
        self._events: Sequence[Mapping[str, Any]] = ()
        self._problem = self._noted = ""
        self._body = Static()
        self._due = asyncio.Event()

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
        """Draw the job as it was read last."""
        self._body.update(Group(*self._parts(self._node(), self.size.width - 1)))

    def note(self, text: str) -> None:
        """Show a message below the job's title, until the next one."""
        self._noted = text
        self.show()

    def action_zoom(self, step: int) -> None:
        self._span = max(0, min(len(_SPANS) - 1, self._span + step))
        self._history = None
        self.show()
        self._due.set()

    def action_clear(self) -> None:
        self._clear(self._job)

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
        name = quote(self._job["id"], safe="")
        with self._open_api(node.url) as api:
            live = read_live(api, name)
            now = live["time"]["unix_seconds"]
            past = api.get(f"/api/v1/history?job={name}&from={now - seconds:.0f}&to={now:.0f}&points={_POINTS}")
            events = api.get(f"/api/v1/events?job={name}&limit={_EVENTS}&fold=true")["events"]
        return live, past, events

    def _parts(self, node: Node, width: int) -> Iterator[RenderableType]:
        live: Row = self._live or node.live or {}
        now, words = live["time"]["unix_seconds"], live["words"]
        current = next((each for each in live["jobs"] if each["id"] == self._job["id"]), None)
        job = self._job = current or self._job
        title = plain(f"{node.name}  {job['name']}".lstrip(), "bold")
        title.append_text(plain(f"  {job['owner']}  {job['state'] or ''}"))
        title.append(f", since {clock(job['since_unix_seconds'], now)}")
        if job["step"] is not None:
            title.append(f", step {job['step']}")
            title.append(f" ({human_seconds(job['step_seconds'])} each)" if job["step_seconds"] else "")
        lost = f"  as of {as_of(live)}" if node.error else "" if current else "  ended"
        yield title.append(lost, style="bold red")
        findings, _, rows = rows_of([Node({**live, "jobs": [job]})])
        for finding in findings:
            if finding["job"]:
                yield plain(f"{finding['mark']:2} {finding['since']} {finding['sentence']}", finding["style"])
        if job["clear"]:
            yield plain(job["clear"]["sentence"], "yellow")
        if self._noted:
            yield plain(self._noted, "bold")
        yield plain("")
        yield from self._past(words, width)
        yield plain("")
        columns = [column for column in JOBS if column.name not in _HIDDEN_COLUMNS]
        yield from Layout(columns, rows, width, words=words).lines(rows)
        yield from _parts_of_memory(job["processes"])
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


def _parts_of_memory(processes: Sequence[Row]) -> Iterator[RenderableType]:
    """Yield the components and the peaks of the phases of each process, as far as they are known."""
    places = [(process["rank"] or UNKNOWN, place) for process in processes for place in process["devices"]]
    for title, field in (("Components", "component_bytes"), ("Peaks of phases", "phase_peak_bytes")):
        names = list(dict.fromkeys(name for _, place in places for name in place.get(field) or ()))
        if names:
            columns = (("Rank", "right"), ("GPU", "left"), *((name, "right") for name in names))
            rows = [
                (rank, place["gpu"] or UNKNOWN, *(short_bytes((place.get(field) or {}).get(name)) for name in names))
                for rank, place in places
            ]
            yield from (plain(""), table(title, columns, rows))
