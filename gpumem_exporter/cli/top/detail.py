"""The screens of one job and of one device in `top`: timeline, findings, processes, parts of memory and events."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import ClassVar
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
from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node_view import Node, read_live, selected
from gpumem_exporter.cli.render.columns import DEVICES, JOBS, LEDGER, clock
from gpumem_exporter.cli.render.layout import Layout, Row
from gpumem_exporter.cli.render.node_tables import finding_lines
from gpumem_exporter.cli.render.rows import as_of, rows_of
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.cli.top.past import Past
from gpumem_exporter.cli.top.source import in_daemon_thread

_REFRESH_SECONDS = 2.0
# The sizes by name that a process may have on a device.
_PARTS = {
    "Components": "component_bytes",
    "Components, unmapped": "component_unmapped_bytes",
    "KV cache": "kv_cache_bytes",
    "Peaks of phases": "phase_peak_bytes",
}


class DetailScreen(ModalScreen[None]):
    """A job or a device, read again every two seconds.

    `node` returns the node as it is now. `clear` asks whether to clear a job; None for a device.
    """

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
        self._part, self._node, self._open_api, self._clear = part, node, open_api, clear
        # The node, with all values of a job; None until it is read.
        self._live: Row | None = None
        self._noted = ""
        self._head, self._past, self._body = Static(), Past(open_api, events=8), Static()

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield from (self._head, self._past, self._body)
        yield Footer()

    def on_mount(self) -> None:
        self.query_one(VerticalScroll).focus()
        self.run_worker(self._watch)  # type: ignore[arg-type]

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    def show(self) -> None:
        """Draw what was read last."""
        node, width = self._node(), self.size.width - 1
        live: Row = self._live or node.live or {}
        now, words, of_job = live["time"]["unix_seconds"], live["words"], self._clear is not None
        name, identity = ("jobs", "id") if of_job else ("devices", "uuid")
        current = next((each for each in live[name] if each[identity] == self._part[identity]), None)
        self._part = part = current or self._part
        lost = f"as of {as_of(live)}" if node.error else "" if current else "ended" if of_job else "removed"
        heading = plain(f"{node.name}  ".lstrip(), "bold")
        heading.append_text(_job_heading(part, now) if of_job else _device_heading(part))
        heading.append(f"  {lost}" if lost else "", style="bold red")
        target = Target(pid=[str(one["pid"]) for one in part["processes"]]) if of_job else Target(uuid=part["uuid"])
        findings, devices, jobs = rows_of([Node(selected({**live, name: [part]}, target))])
        found = [row for row in findings if row["job"] or row.get("uuid")]
        frees = plain((part["clear"] or {}).get("sentence", ""), "yellow") if of_job else plain("")
        self._head.update(Group(heading, *finding_lines(found, words, width), frees, plain(self._noted, "bold")))
        row = {**part, "job": part if of_job else None, "from": node, "now": now}
        self._past.show(row, words, max(4, self.size.height // 4))
        body: list[RenderableType] = []
        tables = [(DEVICES, devices), (LEDGER, [] if of_job else devices), (JOBS[1:], jobs)]
        for columns, rows in reversed(tables) if of_job else tables:
            body += [plain(""), *Layout(columns, rows, width, words=words).lines(rows)] if rows else []
        self._body.update(Group(*body, *_parts_of_memory(part["processes"] if of_job else ())))

    def note(self, text: str) -> None:
        """Show a message below the findings, until the next one."""
        self._noted = text
        self.show()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool:  # noqa: ARG002
        """Return whether an action is possible."""
        return action != "clear" or self._clear is not None

    def action_clear(self) -> None:
        if self._clear is not None:
            self._clear(self._part)

    def action_zoom(self, step: int) -> None:
        self._past.zoom(step)

    async def _watch(self) -> None:
        while True:
            node = self._node()
            if node.url and self._clear is not None:
                with contextlib.suppress(GpumemError):  # the timeline shows it
                    self._live = await in_daemon_thread(partial(self._read, node.url))
            self.show()
            await asyncio.sleep(_REFRESH_SECONDS)

    def _read(self, url: str) -> Row:
        with self._open_api(url) as api:
            return read_live(api, quote(self._part["id"], safe=""))


def _job_heading(job: Row, now: float) -> Text:
    title = plain(job["name"], "bold").append_text(plain(f"  {job['owner']}  {job['state'] or ''}", "not bold"))
    title.append(f", since {clock(job['since_unix_seconds'], now)}")
    if job["step"] is not None:
        title.append(f", step {job['step']}")
        title.append(f" ({human_seconds(job['step_seconds'])} each)" if job["step_seconds"] else "")
    if engine := job.get("engine"):
        title.append(f", {engine['label']}")
        cache = engine["kv_cache"]
        if cache and cache["peak_day"] is not None:
            peak, size = short_bytes(cache["peak_day"]), short_bytes(cache["size"])
            title.append(f", at most {peak} of {size} KV cache used in {human_seconds(cache['observed_seconds'])}")
    return title


def _device_heading(device: Row) -> Text:
    title = plain(f"GPU {device['gpu']}", "bold")
    title.append_text(plain(f"  {device['name']}  {device['uuid']}", "not bold"))
    return title.append(f"  {device['error']}" if device["error"] else "", "bold red")


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
