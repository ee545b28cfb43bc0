"""Who shares a rendering of `/api/v1/live`."""

from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from gpumem_exporter.actions.caller import Caller, CallerKind, Rights
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.server.api.live import LiveNode, Rendering
from gpumem_exporter.server.http.replies import Renderer

ROOT, STRANGER = Caller(CallerKind.LOOPBACK, Rights.ALL, uid=0), Caller(CallerKind.TCP, host="10.0.0.9")
ADA, EVE = (Caller(CallerKind.LOOPBACK, Rights.OWN, uid=uid) for uid in (1000, 1001))
HEALTH = {
    "version": "1",
    "source": "nvml",
    "mode": "node",
    "status": "ok",
    "checks": {},
    "nvml": {"up": True, "error": "", "released": False},
}


class View:
    """A view that counts how often it is rendered, and shows for whom."""

    def __init__(self) -> None:
        self.count = self.value = 0

    def document(self, *_: object, viewer: Caller | None, details: str) -> dict[str, Any]:
        self.count += 1
        return {"value": self.value, "viewer": viewer and viewer.uid, "details": details}


class Bench:
    def __init__(self) -> None:
        self.view, self.renderer, self.now = View(), Renderer(), 100.0
        view, health = self.view, HEALTH
        any_view: Any = view
        any_health: Any = health
        self.node = LiveNode(
            any_view,
            self.renderer,
            snapshot=lambda: Snapshot(self.now, None),
            health=lambda _: any_health,
            facts={"host": "node-7", "allowed_actions": (), "client_directory": ""},
            clock=lambda: self.now,
            wall_clock=lambda: self.now + 5.0,
        )

    def read(self, *viewers: Caller | None, details: str = "") -> list[Rendering]:
        async def run() -> list[Rendering]:
            return [await self.node.of(viewer, details) for viewer in viewers]

        return asyncio.run(run())


def test_pages_share_a_recent_rendering() -> None:
    bench = Bench()
    with contextlib.closing(bench.renderer):
        first, second = bench.read(None, ROOT)
        bench.now += 0.4
        assert first is second is bench.read(None)[0]
        assert json.loads(first.time) == {"clock_seconds": 100.0, "unix_seconds": 105.0}
        bench.now += 0.2
        (later,) = bench.read(None)
        assert bench.view.count == 2
        assert (later.digest, later.time) == (first.digest, b'{"clock_seconds": 100.6, "unix_seconds": 105.6}')
        bench.now, bench.view.value = 102.0, 1
        assert bench.read(None)[0].digest != first.digest


def test_viewers_with_other_rights_never_share_a_rendering() -> None:
    bench = Bench()
    with contextlib.closing(bench.renderer):
        viewers = (ROOT, STRANGER, ADA, EVE, ADA, STRANGER, ROOT)

        async def read_at_once() -> list[Rendering]:
            return await asyncio.gather(*(bench.node.of(viewer, "") for viewer in viewers))

        for seen in (bench.read(*viewers), asyncio.run(read_at_once())):
            assert [json.loads(each.document)["viewer"] for each in seen] == [0, None, 1000, 1001, 1000, None, 0]
