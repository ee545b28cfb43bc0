"""The screen of one job in `top`: its timeline, processes, components, phases and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar
from urllib.parse import quote

from rich.console import RenderableType
from rich.text import Text
from textual.binding import Binding, BindingType

from gpumem_client.wire.units import UNKNOWN, human_seconds, short_bytes
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node import Node
from gpumem_exporter.cli.render.columns import JOBS, clock
from gpumem_exporter.cli.render.layout import Layout
from gpumem_exporter.cli.render.rows import Row, rows_of
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.cli.top.detail import DetailScreen, finding_lines

_PARTS = {
    "Components": "component_bytes",
    "Components, unmapped": "component_unmapped_bytes",
    "KV cache": "kv_cache_bytes",
    "Peaks of phases": "phase_peak_bytes",
}
"""The sizes by name that a process may have on a device."""
_HIDDEN_COLUMNS = ("fold", "owner", "growth", "devices")


class JobScreen(DetailScreen):
    """One job. `clear` asks whether to clear it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("c", "clear", "clear")]

    def __init__(
        self, job: Row, node: Callable[[], Node], open_api: Callable[[str], ExporterApi], clear: Callable[[Row], None]
    ) -> None:
        name = quote(job["id"], safe="")
        super().__init__(node, open_api, query=f"job={name}", details=name)
        self._job, self._clear = job, clear

    def action_clear(self) -> None:
        self._clear(self._job)

    def heading(self, live: Row, now: float) -> tuple[Text, str]:
        current = next((each for each in live["jobs"] if each["id"] == self._job["id"]), None)
        job = self._job = current or self._job
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
        return title, "" if current else "ended"

    def findings(self, live: Row) -> Iterator[Text]:
        found, _, _ = rows_of([Node({**live, "jobs": [self._job]})])
        yield from finding_lines(row for row in found if row["job"])
        if self._job["clear"]:
            yield plain(self._job["clear"]["sentence"], "yellow")

    def tables(self, live: Row, width: int) -> Iterator[RenderableType]:
        _, _, rows = rows_of([Node({**live, "jobs": [self._job]})])
        columns = [column for column in JOBS if column.name not in _HIDDEN_COLUMNS]
        yield from Layout(columns, rows, width, words=live["words"]).lines(rows)
        yield from _parts_of_memory(self._job["processes"])


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
