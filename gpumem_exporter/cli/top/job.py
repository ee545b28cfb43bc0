"""The screen of one job in `top`: its timeline, processes, phases, components and events."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
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
from gpumem_client.wire.units import human_seconds, short_bytes
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.live import in_daemon_thread
from gpumem_exporter.cli.node import Node, read_live
from gpumem_exporter.cli.render.columns import JOBS, SEVERITIES, clock
from gpumem_exporter.cli.render.event_table import event_table
from gpumem_exporter.cli.render.layout import Layout
from gpumem_exporter.cli.render.rows import Colors, Row, View, as_of, job_rows
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.cli.top.plot import legend, timeline

SPANS = (("10 min", 600), ("1 h", 3600), ("6 h", 21600), ("24 h", 86400))
_REFRESH_SECONDS = 2.0
_EVENTS = 50
_POINTS = 2000
_MARKS = {"oom": ("!", "bold red"), "action": ("c", "bold yellow")}
"""The character of an event on the timeline, and its style."""


class JobScreen(ModalScreen[None]):
    """One job, read again every two seconds. `node` returns the job's node as it is now."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "back"),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", key_display="+"),
        Binding("minus", "zoom(1)", "zoom out", key_display="-"),
        Binding("c", "clear", "clear"),
        Binding("j,down", "scroll('down')", show=False),
        Binding("k,up", "scroll('up')", show=False),
        Binding("space,pagedown", "scroll('page_down')", show=False),
        Binding("b,pageup", "scroll('page_up')", show=False),
    ]
    DEFAULT_CSS = """
    JobScreen { background: ansi_default; }
    JobScreen VerticalScroll { height: 1fr; }
    """

    def __init__(
        self,
        job: Row,
        node: Callable[[], Node],
        open_api: Callable[[str], ExporterApi],
        clear: Callable[[Row], None],
    ) -> None:
        super().__init__()
        self._job, self._node, self._open_api, self._clear = job, node, open_api, clear
        self._span = 0
        self._whole: Mapping[str, Any] = {}
        """The job with all values of its processes; empty until it is read."""
        self._history: Mapping[str, Any] | None = None
        self._events: list[Mapping[str, Any]] = []
        self._problem = ""
        self._body = Static()
        self._due = asyncio.Event()

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._body
        yield Footer()

    def on_mount(self) -> None:
        self.show()
        self.run_worker(self._watch())

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Draw the job as it was read last."""
        self._body.update(Group(*self._parts(self._node(), self.size.width - 1)))

    def action_zoom(self, step: int) -> None:
        self._span = max(0, min(len(SPANS) - 1, self._span + step))
        self._history = None
        self._due.set()

    def action_clear(self) -> None:
        self._clear(self._job)

    def action_scroll(self, where: str) -> None:
        getattr(self.query_one(VerticalScroll), f"scroll_{where}")(animate=False)

    async def _watch(self) -> None:
        while True:
            node, seconds = self._node(), SPANS[self._span][1]
            if node.url:
                try:
                    self._whole, self._history, self._events = await in_daemon_thread(
                        partial(self._read, node, seconds)
                    )
                    self._problem = ""
                except GpumemError as error:
                    self._problem = str(error)
            else:
                self._problem = "The past needs an exporter, and no exporter answers."
            self.show()
            self._due.clear()
            try:
                await asyncio.wait_for(self._due.wait(), _REFRESH_SECONDS)
            except asyncio.TimeoutError:
                continue

    def _read(self, node: Node, seconds: float) -> tuple[Mapping[str, Any], Mapping[str, Any], list[Mapping[str, Any]]]:
        name = quote(self._job["id"], safe="")
        with self._open_api(node.url) as api:
            live = read_live(api, name)
            whole: Row = next((job for job in live["jobs"] if job["id"] == self._job["id"]), {})
            now = live["time"]["unix_seconds"]
            past = api.get(f"/api/v1/history?job={name}&from={now - seconds:.0f}&to={now:.0f}&points={_POINTS}")
            events = api.get(f"/api/v1/events?job={name}&limit={_EVENTS}")["events"]
        return whole, past, events

    def _parts(self, node: Node, width: int) -> Iterator[RenderableType]:
        live = node.live or {}
        job = next((each for each in live["jobs"] if each["id"] == self._job["id"]), None)
        yield self._title(job or self._job, live, ended=job is None, lost=node.error)
        job = job or self._job
        for finding in live["findings"]:
            if finding["job"] == job["id"]:
                mark, style = SEVERITIES.get(finding["severity"], ("", ""))
                since = clock(finding["since_unix_seconds"], live["time"]["unix_seconds"])
                yield plain(f"{mark:2} {since} {finding['sentence']}", style)
        if job["clear"]:
            yield plain(job["clear"]["sentence"], "yellow")
        yield plain("")
        yield from self._past(live, width)
        yield plain("")
        view = Node({**live, "jobs": [{**job, **({"processes": self._whole["processes"]} if self._whole else {})}]})
        rows = job_rows([view], View(), Colors())
        columns = tuple(column for column in JOBS if column.name not in ("fold", "owner", "growth", "devices"))
        yield from Layout(columns, rows, width, words=live["words"], compact=True).lines(rows)
        yield from _parts_of_memory(self._whole)
        if self._events:
            yield plain("")
            yield event_table(self._events, live["time"]["unix_seconds"], wrap=True)

    def _title(self, job: Row, live: Row, *, ended: bool, lost: str) -> Text:
        line = plain(job["name"], "bold").append(f"  {job['owner']}  ")
        line.append(f"{job['state'] or ''}, since {clock(job['since_unix_seconds'], live['time']['unix_seconds'])}")
        if job["step"] is not None:
            seconds = f" ({human_seconds(job['step_seconds'])} each)" if job["step_seconds"] else ""
            line.append(f", step {job['step']}{seconds}")
        if lost:
            line.append(f"  as of {as_of(live)}", style="bold red")
        elif ended:
            line.append("  ended", style="bold red")
        return line

    def _past(self, live: Row, width: int) -> Iterator[Text]:
        span = SPANS[self._span][0]
        if self._history is None:
            yield plain(self._problem or f"reading the last {span} …", "dim")
            return
        marks = [(event["unix_seconds"], *_MARKS[event["type"]]) for event in self._events if event["type"] in _MARKS]
        height = max(4, min(16, self.size.height // 3))
        yield from timeline(self._history, width, height, marks)
        line = legend(live["words"]).append(f"last {span}", style="bold")
        if marks:
            line.append("  ! out of memory  c action")
        yield line.append(f"  {self._problem}", style="red") if self._problem else line


def _parts_of_memory(job: Row) -> Iterator[RenderableType]:
    """Yield the components and the peaks of the phases of each rank, as far as they are known."""
    for title, field in (("Components", "component_bytes"), ("Peaks of phases", "phase_peak_bytes")):
        places = [(process, place) for process in job.get("processes", ()) for place in process["devices"]]
        names = list(dict.fromkeys(name for _, place in places for name in place.get(field) or ()))
        if names:
            columns = (("Rank", "right"), ("GPU", "left"), *((name, "right") for name in names))
            rows = [
                (process["rank"] or "-", place["gpu"] or "-", *(short_bytes(place[field].get(name)) for name in names))
                for process, place in places
                if place.get(field)
            ]
            yield plain("")
            yield table(title, columns, rows)
