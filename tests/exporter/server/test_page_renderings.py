from __future__ import annotations

import asyncio
import contextlib
import json
from typing import Any

from gpumem_exporter.actions.caller import Caller, CallerKind, Rights
from gpumem_exporter.server.http.replies import Renderer
from gpumem_exporter.server.web.live import LiveRenderings, Rendering

ROOT, STRANGER = Caller(CallerKind.LOOPBACK, Rights.ALL, uid=0), Caller(CallerKind.TCP, host="10.0.0.9")
ADA, EVE = (Caller(CallerKind.LOOPBACK, Rights.OWN, uid=uid) for uid in (1000, 1001))


class State:
    """A state that counts how often it is rendered, and shows for whom."""

    def __init__(self) -> None:
        self.count = 0
        self.now = 100.0
        self.value = 0

    def document(self, viewer: Caller | None, *, whole_processes: bool) -> dict[str, Any]:
        self.count += 1
        return {"value": self.value, "viewer": viewer and viewer.uid, "whole": whole_processes}


class Bench:
    def __init__(self) -> None:
        self.state, self.renderer = State(), Renderer()
        state: Any = self.state
        self.renderings = LiveRenderings(
            state, self.renderer, clock=lambda: self.state.now, wall_clock=lambda: self.state.now + 5.0
        )

    def read(self, *viewers: Caller | None, whole: bool = False) -> list[Rendering]:
        async def run() -> list[Rendering]:
            return [await self.renderings.of(viewer, whole_processes=whole) for viewer in viewers]

        return asyncio.run(run())


def test_pages_share_a_recent_rendering() -> None:
    bench = Bench()
    with contextlib.closing(bench.renderer):
        first, second = bench.read(None, ROOT)
        bench.state.now += 0.4
        assert first is second is bench.read(None)[0]
        assert json.loads(first.moment) == {"clock_seconds": 100.0, "unix_seconds": 105.0}
        bench.state.now += 0.2
        (later,) = bench.read(None)
        assert bench.state.count == 2
        assert (later.digest, later.moment) == (first.digest, b'{"clock_seconds": 100.6, "unix_seconds": 105.6}')
        bench.state.now, bench.state.value = 102.0, 1
        assert bench.read(None)[0].digest != first.digest


def test_viewers_with_other_rights_never_share_a_rendering() -> None:
    bench = Bench()
    with contextlib.closing(bench.renderer):
        seen = [json.loads(each.state)["viewer"] for each in bench.read(ROOT, STRANGER, ADA, EVE, ADA, STRANGER, ROOT)]
        assert seen == [0, None, 1000, 1001, 1000, None, 0]


def test_a_command_gets_a_rendering_of_its_own() -> None:
    bench = Bench()
    with contextlib.closing(bench.renderer):
        bench.read(None, None, whole=True)
        assert json.loads(bench.read(None)[0].state)["whole"] is False
        assert bench.state.count == 3
