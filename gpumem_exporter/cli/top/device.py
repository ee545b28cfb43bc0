"""The screen of one device in `top`: its timeline, ledger, processes and events."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from urllib.parse import quote

from rich.text import Text

from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node import Node, selected
from gpumem_exporter.cli.render.columns import DEVICES, JOBS, LEDGER
from gpumem_exporter.cli.render.layout import Layout, Order
from gpumem_exporter.cli.render.rows import Row, rows_of
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.detail import DetailScreen, finding_lines

_SHOWN_COLUMNS = ("gpu", "name")
_HIDDEN_COLUMNS = ("fold", "devices", "growth")


class DeviceScreen(DetailScreen):
    """One device. `device` is its row."""

    def __init__(self, device: Row, node: Callable[[], Node], open_api: Callable[[str], ExporterApi]) -> None:
        super().__init__(node, open_api, query=f"device={quote(device['uuid'], safe='')}")
        self._device = device

    def heading(self, live: Row, now: float) -> tuple[Text, str]:  # noqa: ARG002
        current = next((each for each in live["devices"] if each["uuid"] == self._device["uuid"]), None)
        self._device = current or self._device
        title = plain(f"GPU {self._device['gpu']}", "bold")
        title.append_text(plain(f"  {self._device['name']}  {self._device['uuid']}", "not bold"))
        return title, self._device["error"] if current else "removed"

    def findings(self, live: Row) -> Iterator[Text]:
        found, _, _ = rows_of([Node({**live, "devices": [], "jobs": []})])
        yield from finding_lines(row for row in found if row.get("uuid") == self._device["uuid"])

    def tables(self, live: Row, width: int) -> Iterator[Text]:
        here = selected({**live, "devices": [self._device]}, Target(uuid=self._device["uuid"]))
        _, devices, jobs = rows_of([Node(here)])
        named = (
            {**row, "title": f"{row['job']['name']}{row['title'][1:]}", "owner": row["job"]["owner"]}
            for row in jobs
            if row["level"]
        )
        processes = Order("used").sorted(named, JOBS)
        drawn = (
            ([column for column in DEVICES if column.name not in _SHOWN_COLUMNS], devices),
            (LEDGER, [row for row in devices if row["ledger"]]),
            ([column for column in JOBS if column.name not in _HIDDEN_COLUMNS], processes),
        )
        for columns, rows in drawn:
            if rows:
                yield from Layout(columns, rows, width, words=live["words"]).lines(rows)
                yield plain("")
