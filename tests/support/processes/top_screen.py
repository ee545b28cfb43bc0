"""`top` with prepared documents and a prepared exporter, on a screen that a test reads and types on."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

from textual.pilot import Pilot

from gpumem_exporter.cli.node_view import Node
from gpumem_exporter.cli.render.node_tables import View
from gpumem_exporter.cli.top.app import Top
from gpumem_exporter.cli.top.tables import RowTable
from tests.support.builders.live_documents import GIB, full_node, history
from tests.support.waiting import patient

URL = "unix:///run/gpumem/exporter.sock"
_RESULT = {
    "pid": 50723,
    "workload": "notebook",
    "rank": "",
    "gpu": "7",
    "outcome": "done",
    "freed_bytes": 3 * GIB,
    "still_free_bytes": 3 * GIB,
}


class TopScreen:
    """A node and its exporter, which also is the API that `top` opens."""

    def __init__(self, document: dict[str, Any] | None = None, *, nodes: list[Node] | None = None, **view: Any) -> None:
        self.nodes = nodes or [Node(document or full_node(), URL)]
        self.requests: list[Mapping[str, Any]] = []
        self.paths: list[str] = []
        self.results: list[dict[str, Any]] = [dict(_RESULT)]
        self.error: Exception | None = None
        self.lost: Exception | None = None
        self.waits = False
        self.engines: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.hangs = threading.Event()
        self.hangs.set()
        self.app = Top(
            self.read,
            (self.nodes, ()),
            View(**view),
            interval_seconds=0.5,
            open_api=lambda _: self,  # type: ignore[arg-type,return-value]
        )

    def read(self) -> tuple[list[Node], tuple[str, ...]]:
        self.hangs.wait()
        if self.lost is not None:
            raise self.lost
        return self.nodes, ()

    def __enter__(self) -> TopScreen:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def get(self, path: str) -> Any:
        self.paths.append(path)
        if self.error is not None:
            raise self.error
        if path.startswith("/api/v1/history"):
            seconds = int(query_value(path, "to")) - int(query_value(path, "from"))
            name = query_value(path, "device" if "device=" in path else "job")
            return history(name, seconds=seconds, step=1 if seconds <= 600 else 60)
        if path.startswith("/api/v1/events"):
            return {"events": self.events}
        assert self.nodes[0].live is not None
        document = {**self.nodes[0].live}
        document["jobs"] = [_detailed(one) if one["id"] in path else one for one in document["jobs"]]
        return document

    def submit(self, request: Mapping[str, Any]) -> Any:
        self.requests.append(request)
        if self.error is not None:
            raise self.error
        return self.action("")

    def action(self, _: str) -> Any:
        state, results = ("running", []) if self.waits else ("done", self.results)
        pending = [{"pid": 50100, "workload": "llm-pretrain", "rank": "0", "job": "", "mode": "step"}]
        return {
            "id": "a",
            "action": "empty_cache",
            "dry_run": False,
            "state": state,
            "mode": "auto",
            "pending": pending if self.waits else [],
            "results": results,
            "waits_for": self.engines,
            "freed_bytes": 3 * GIB,
            "still_free_bytes": 3 * GIB,
            "settle_seconds": 0.0,
        }

    def cancel(self, _: str) -> Any:
        self.waits = False
        self.results = [{**each, "outcome": "refused", "reason": "cancelled"} for each in self.results]
        return self.action("")

    @asynccontextmanager
    async def on_screen(self, width: int = 80, height: int = 24) -> AsyncIterator[Pilot[None]]:
        async with self.app.run_test(size=(width, height), notifications=True) as pilot:
            await pilot.pause()
            await until(lambda: "quit" in self.text, "the footer, which is drawn last")
            yield pilot
            self.hangs.set()

    @property
    def text(self) -> str:
        """The screen, line by line."""
        lines = self.app.screen._compositor.render_strips(self.app.size)
        return "\n".join(line.text.rstrip() for line in lines)

    def table(self, name: str) -> RowTable:
        """A table of the main screen."""
        return self.app.screen_stack[0].query_one(f"#{name}", RowTable)

    @property
    def titles(self) -> list[str]:
        """The listed jobs and processes."""
        return [row["title"].strip() for row in self.table("jobs").rows_shown]

    @property
    def gpus(self) -> list[str]:
        return [row["gpu"] for row in self.table("devices").rows_shown]

    @property
    def selected(self) -> str:
        row = self.table("jobs").selected
        return "" if row is None else row["title"].strip()

    async def place(self, text: str) -> tuple[int, int]:
        """The place of a text on the screen, once it is drawn."""
        await until(lambda: text in self.text, text)
        lines = self.text.split("\n")
        y = next(y for y, shown in enumerate(lines) if text in shown)
        return (lines[y].index(text) + 1, y)


def query_value(path: str, name: str) -> str:
    return dict(part.split("=") for part in path.partition("?")[2].split("&"))[name]


def _detailed(one: dict[str, Any]) -> dict[str, Any]:
    """A job with the values that only details have."""
    places = {"component_bytes": {"parameters": 16 * GIB}, "phase_peak_bytes": {"forward": 30 * GIB}}
    processes = [{**each, "devices": [{**place, **places} for place in each["devices"]]} for each in one["processes"]]
    return {**one, "processes": processes}


async def until(condition: Callable[[], object], what: str) -> None:
    end = time.monotonic() + patient(30)
    while not condition():
        assert time.monotonic() < end, f"waited for {what}"
        await asyncio.sleep(0.01)
