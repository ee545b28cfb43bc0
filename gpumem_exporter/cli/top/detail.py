"""The screens of one job and of one device in `top`: timeline, findings, processes, parts of memory and events."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
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
from gpumem_exporter.actions.declarations import Target
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node import Node, read_live, selected
from gpumem_exporter.cli.render.columns import DEVICES, JOBS, LEDGER, clock, event_line
from gpumem_exporter.cli.render.layout import Column, Layout, Order
from gpumem_exporter.cli.render.rows import Row, as_of, rows_of
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.cli.top.plot import legend, timeline
from gpumem_exporter.cli.top.source import in_daemon_thread

_SPANS = (("10 min", 600), ("1 h", 3600), ("6 h", 21600), ("24 h", 86400))
_REFRESH_SECONDS = 2.0
_EVENTS, _POINTS = 50, 2000
# The character of an event on the timeline, and its style.
_MARKS = {"oom": ("!", "bold red"), "action": ("c", "bold yellow")}
# The sizes by name that a process may have on a device.
_PARTS = {
    "Components": "component_bytes",
    "Components, unmapped": "component_unmapped_bytes",
    "KV cache": "kv_cache_bytes",
    "Peaks of phases": "phase_peak_bytes",
}


class DetailScreen(ModalScreen[None]):
    """A part of a node, read again every two seconds. `node` returns the node as it is now."""

    PLACE: ClassVar[tuple[str, str, str]]
    """The part's list in `/api/v1/live`, the key of its identity there, and its parameter in the other routes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "back"),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", key_display="+"),
        Binding("minus", "zoom(1)", "zoom out", key_display="-"),
    ]
    DEFAULT_CSS = """
    DetailScreen { background: ansi_default; }
    DetailScreen VerticalScroll { height: 1fr; }
    """

    def __init__(self, part: Row, node: Callable[[], Node], open_api: Callable[[str], ExporterApi]) -> None:
        super().__init__()
        self.part = part
        self._node, self._open_api = node, open_api
        _, identity, parameter = self.PLACE
        self._identity = quote(part[identity], safe="")
        self._query = f"{parameter}={self._identity}"
        self._span = 0
        # The node, with all values of a job; None until it is read.
        self._live: Row | None = None
        self._history: Mapping[str, Any] | None = None
        self._events: Sequence[Mapping[str, Any]] = ()
        self._problem = self._noted = ""
        self._body = Static()
        self._due = asyncio.Event()

    @abstractmethod
    def heading(self, now: float) -> Text:
        """Return the first line."""

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
            live = read_live(api, self._identity if self.PLACE[0] == "jobs" else "none")
            now = live["time"]["unix_seconds"]
            past = api.get(f"/api/v1/history?{self._query}&from={now - seconds:.0f}&to={now:.0f}&points={_POINTS}")
            events = api.get(f"/api/v1/events?{self._query}&limit={_EVENTS}&fold=true")["events"]
        return live, past, events

    def _parts(self, node: Node, width: int) -> Iterator[RenderableType]:
        live: Row = self._live or node.live or {}
        now = live["time"]["unix_seconds"]
        name, identity, _ = self.PLACE
        current = next((each for each in live[name] if each[identity] == self.part[identity]), None)
        self.part = current or self.part
        lost = f"as of {as_of(live)}" if node.error else "" if current else "ended" if name == "jobs" else "removed"
        heading = plain(f"{node.name}  ".lstrip(), "bold").append_text(self.heading(now))
        yield heading.append(f"  {lost}" if lost else "", style="bold red")
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


class JobScreen(DetailScreen):
    """One job. `clear` asks whether to clear it."""

    PLACE = ("jobs", "id", "job")
    BINDINGS: ClassVar[list[BindingType]] = [Binding("c", "clear", "clear")]

    def __init__(
        self, job: Row, node: Callable[[], Node], open_api: Callable[[str], ExporterApi], clear: Callable[[Row], None]
    ) -> None:
        super().__init__(job, node, open_api)
        self._clear = clear

    def action_clear(self) -> None:
        self._clear(self.part)

    def heading(self, now: float) -> Text:
        job = self.part
        title = plain(job["name"], "bold").append_text(plain(f"  {job['owner']}  {job['state'] or ''}", "not bold"))
        title.append(f", since {clock(job['since_unix_seconds'], now)}")
        if job["step"] is not None:
            title.append(f", step {job['step']}")
            title.append(f" ({human_seconds(job['step_seconds'])} each)" if job["step_seconds"] else "")
        engine = job.get("engine")
        if engine:
            title.append(f", {engine['label']}")
            cache = engine["kv_cache"]
            if cache and cache["peak_day"] is not None:
                peak, size = short_bytes(cache["peak_day"]), short_bytes(cache["size"])
                title.append(f", at most {peak} of {size} KV cache used in {human_seconds(cache['observed_seconds'])}")
        return title

    def findings(self, live: Row) -> Iterator[Text]:
        found, _, _ = rows_of([Node({**live, "jobs": [self.part]})])
        yield from _finding_lines(row for row in found if row["job"])
        if self.part["clear"]:
            yield plain(self.part["clear"]["sentence"], "yellow")

    def tables(self, live: Row, width: int) -> Iterator[RenderableType]:
        _, _, rows = rows_of([Node({**live, "jobs": [self.part]})])
        yield from _lines(JOBS, ("fold", "owner", "growth", "devices"), rows, live, width)
        yield from _parts_of_memory(self.part["processes"])


class DeviceScreen(DetailScreen):
    """One device."""

    PLACE = ("devices", "uuid", "device")

    def heading(self, now: float) -> Text:  # noqa: ARG002
        device = self.part
        title = plain(f"GPU {device['gpu']}", "bold")
        title.append_text(plain(f"  {device['name']}  {device['uuid']}", "not bold"))
        return title.append(f"  {device['error']}" if device["error"] else "", "bold red")

    def findings(self, live: Row) -> Iterator[Text]:
        found, _, _ = rows_of([Node({**live, "devices": [], "jobs": []})])
        yield from _finding_lines(row for row in found if row.get("uuid") == self.part["uuid"])

    def tables(self, live: Row, width: int) -> Iterator[Text]:
        here = selected({**live, "devices": [self.part]}, Target(uuid=self.part["uuid"]))
        _, devices, jobs = rows_of([Node(here)])
        processes = [
            {**row, "title": f"{row['job']['name']}{row['title'][1:]}", "owner": row["job"]["owner"]}
            for row in Order("used").sorted(jobs, JOBS)
            if row["level"]
        ]
        for columns, hidden, rows in (
            (DEVICES, ("gpu", "name"), devices),
            (LEDGER, (), [row for row in devices if row["ledger"]]),
            (JOBS, ("fold", "devices", "growth"), processes),
        ):
            if rows:
                yield from _lines(columns, hidden, rows, live, width)
                yield plain("")


def _lines(
    columns: Iterable[Column], hidden: Container[str], rows: Sequence[Row], live: Row, width: int
) -> Iterator[Text]:
    """Yield a table without the columns that say the same in each row, or are of a list of jobs."""
    shown = [column for column in columns if column.name not in hidden]
    yield from Layout(shown, rows, width, words=live["words"]).lines(rows)


def _parts_of_memory(processes: Sequence[Row]) -> Iterator[RenderableType]:
    """Yield the components and the peaks of the phases of each process, as far as they are known."""
    places = [(process["rank"] or UNKNOWN, place) for process in processes for place in process["devices"]]
    for title, field in _PARTS.items():
        names = list(dict.fromkeys(name for _, place in places for name in place.get(field) or ()))
        if names:
            columns = (("Rank", "right"), ("GPU", "left"), *((name, "right") for name in names))
            rows = [
                (rank, place["gpu"] or UNKNOWN, *(short_bytes((place.get(field) or {}).get(name)) for name in names))
                for rank, place in places
            ]
            yield from (plain(""), table(title, columns, rows))


def _finding_lines(rows: Iterable[Row]) -> Iterator[Text]:
    """Yield a line for each finding."""
    for row in rows:
        yield plain(f"{row['mark']:2} {row['since']} {row['sentence']}", row["style"])
        if row["next"]:
            yield plain(f"   {row['next']}", "dim")
