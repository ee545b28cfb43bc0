"""A job or a device in `top`: its past and, on its own screen, what `info` shows of it."""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar
from urllib.parse import quote

from rich.console import Group, RenderableType
from rich.text import Text
from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Footer, Static

from gpumem_client.wire.errors import GpumemError
from gpumem_client.wire.units import UNKNOWN, short_bytes
from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node_view import Node, read_live, selected
from gpumem_exporter.cli.program import in_daemon_thread
from gpumem_exporter.cli.render.columns import clock, event_line
from gpumem_exporter.cli.render.layout import Row
from gpumem_exporter.cli.render.node_tables import View, as_of, called, node_tables
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.page.words import WORDS

_SPANS = (("10 min", 600), ("1 h", 3600), ("6 h", 21600), ("24 h", 86400))
_REFRESH_SECONDS = 2.0
# Nothing is read of the rows that a person passes on the way to another one.
_PAUSE_SECONDS = 0.1
_EVENTS = 8
# The sizes by name that a process may have on a device.
_PARTS = {
    "Components": "component_bytes",
    "Components, unmapped": "component_unmapped_bytes",
    "KV cache": "kv_cache_bytes",
    "Peaks of phases": "phase_peak_bytes",
}

_SIZES = (("used", "blue"), ("allocated", "green"), ("idle_cache", "yellow"))
_BARS = " ▁▂▃▄▅▆▇█"
_NAME_WIDTH, _HIGHEST_WIDTH = 11, 7


class Detail(Static):
    """A job or a device, read again every two seconds while it is displayed; with `brief`, only its past."""

    def __init__(self, open_api: Callable[[str], ExporterApi], span: int = 0, *, brief: bool = False) -> None:
        super().__init__()
        self._open_api, self._span, self._is_brief = open_api, span, brief
        self.part: Row = {}
        """The job or the device as it was read last; empty for none."""

    def on_resize(self) -> None:
        if self.part:
            self.show()

    def follow(self, part: Row, node: Callable[[], Node]) -> None:
        """Show a job or a device from now on. `node` returns its node as it is now."""
        self.part, self._node, self._of_job = part, node, "processes" in part
        # The node with all values of the job, and the past; None until they are read.
        self._live: Row | None = None
        self._history: Row | None = None
        self._events: Sequence[Row] = ()
        self._problem = ""
        self.zoom(0)

    def show(self) -> None:
        """Draw what was read last."""
        node, of_job, width = self._node(), self._of_job, self.app.size.width - 1
        live: Row = self._live or node.live or {}
        name, identity = ("jobs", "id") if of_job else ("devices", "uuid")
        current = next((each for each in live[name] if each[identity] == self.part[identity]), None)
        self.part = part = current or self.part
        lost = f"as of {as_of(live)}" if node.error else "" if current else "ended" if of_job else "removed"
        heading = called(part) if of_job else f"GPU {part['gpu']}  {part['name']}  {part['uuid']}"
        title = plain(f"{node.name}  {heading}".lstrip(), "bold")
        title.append(f"  {lost}" if lost else "", style="bold red")
        target = Target(pid=[str(one["pid"]) for one in part["processes"]]) if of_job else Target(uuid=part["uuid"])
        shown = Node(selected({**live, name: [part]}, target), node.url)
        _, *tables = node_tables([shown], View(), width, wide=True, ledger=not of_job)
        if of_job and part["clear"]:
            title.append(f"\n{part['clear']['sentence']}", style="yellow")
        past = self._past(live["time"]["unix_seconds"], width)
        parts = _parts_of_memory(part["processes"] if of_job else ())
        self.update(Group(title, *past, *(() if self._is_brief else (*tables, *parts))))

    def zoom(self, step: int) -> None:
        """Show a longer or a shorter time."""
        self._span = max(0, min(len(_SPANS) - 1, self._span + step))
        self._watch()

    @work(exclusive=True)
    async def _watch(self) -> None:
        self.show()
        await asyncio.sleep(_PAUSE_SECONDS)
        while True:
            if self._node().url and self.display:
                try:
                    self._live, self._history, self._events = await in_daemon_thread(self._read)
                    self._problem = ""
                except GpumemError as error:
                    self._problem = str(error)
            self.show()
            await asyncio.sleep(_REFRESH_SECONDS)

    def _read(self) -> tuple[Row, Row, Sequence[Row]]:
        id_ = quote(self.part["id" if self._of_job else "uuid"], safe="")
        subject = f"{'job' if self._of_job else 'device'}={id_}"
        with self._open_api(self._node().url) as api:
            live = read_live(api, id_ if self._of_job else "none")
            now = live["time"]["unix_seconds"]
            span = f"from={now - _SPANS[self._span][1]:.0f}&to={now:.0f}&points={_bar_count(self.app.size.width - 1)}"
            history = api.get(f"/api/v1/history?{subject}&{span}")
            return live, history, api.get(f"/api/v1/events?{subject}&limit={_EVENTS}&fold=true")["events"]

    def _past(self, now: float, width: int) -> Iterator[Text]:
        """Yield the timeline and the latest events."""
        yield plain(f"last {_SPANS[self._span][0]}  ", "bold").append_text(plain(self._problem, "red"))
        if self._history is None:
            yield plain("Reading …" if self._node().url else "The past needs an exporter; none answers.", "dim")
            return
        yield from timeline(self._history, width)
        for event in sorted(self._events, key=lambda event: -float(event["unix_seconds"])):
            yield event_line(event, now, width)


class DetailScreen(ModalScreen[None]):
    """The screen of a job or a device. `clear` asks whether to clear a job; None for a device."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q", "dismiss", "back"),
        Binding("plus,equals_sign", "zoom(-1)", "zoom in", key_display="+"),
        Binding("minus", "zoom(1)", "zoom out", key_display="-"),
        Binding("c", "clear", "clear"),
    ]
    DEFAULT_CSS = """
    DetailScreen { background: ansi_default; }
    DetailScreen VerticalScroll { height: 1fr; }
    """

    def __init__(
        self,
        part: Row,
        node: Callable[[], Node],
        open_api: Callable[[str], ExporterApi],
        clear: Callable[[Row], None] | None = None,
    ) -> None:
        super().__init__()
        self._part, self._node, self._clear = part, node, clear
        self._detail = Detail(open_api)

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield self._detail
        yield Footer()

    def on_mount(self) -> None:
        self._detail.follow(self._part, self._node)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:  # noqa: ARG002
        """Return whether an action is possible."""
        return action != "clear" or self._clear is not None

    def action_clear(self) -> None:
        if self._clear is not None:
            self._clear(self._detail.part)

    def action_zoom(self, step: int) -> None:
        self._detail.zoom(step)


def _bar_count(width: int) -> int:
    """Return the number of bars in a terminal of this width."""
    return max(1, width - _NAME_WIDTH - _HIGHEST_WIDTH)


def timeline(history: Row, width: int) -> Iterator[Text]:
    """Yield a line for each size of a history's first series, with the highest value at its end, and the times.

    All lines have one scale. A bar is blank where nothing is known.
    """
    start, end, times = (history[name] for name in ("from_unix_seconds", "to_unix_seconds", "unix_seconds"))
    count = _bar_count(width)
    moments = [start + (bar + 0.5) * (end - start) / count for bar in range(count)]
    points = [(bisect_left(times, moment), moment) for moment in moments]
    series = history["series"][0] if history["series"] else {}
    top = max((size for size in series["used"]["max"] if size is not None), default=0) if series else 0
    for name, color in _SIZES:
        sizes = series[name]["max"] if series else [None] * len(times)
        bars = ""
        for index, moment in points:
            size = sizes[index] if index < len(times) and times[index] - history["step_seconds"] < moment else None
            bars += _BARS[min(8, math.ceil(8 * size / top))] if size and top else " "
        highest = max((size for size in sizes if size is not None), default=None)
        line = plain(WORDS[name]["label"].ljust(_NAME_WIDTH))
        yield line.append(bars, style=color).append(short_bytes(highest).rjust(_HIGHEST_WIDTH), style=color)
    yield plain(f"{'':{_NAME_WIDTH}}{clock(start)}{clock(end).rjust(count - len(clock(start)))}", "dim")


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
