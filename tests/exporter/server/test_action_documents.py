from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from gpumem_exporter.actions.model import Action, ActionResult
from gpumem_exporter.actions.request import Target
from gpumem_exporter.server.api import actions as module
from gpumem_exporter.server.api.actions import INLINE_RESULTS, ActionRoutes, action_document
from gpumem_exporter.server.http.replies import Renderer


class NoAudit:
    async def wait_until_stored(self, _: Action) -> None:
        return


async def test_requests_for_one_action_that_wait_build_its_document_once(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []

    def counted(action: Action, *suggested: Any) -> dict[str, Any]:
        built.append(action.id)
        return action_document(action, *suggested)

    monkeypatch.setattr(module, "action_document", counted)
    result = ActionResult(1, "llm", "0", "0", "GPU-1", "done")
    results = (result,) * (INLINE_RESULTS + 1)
    action = Action("1", "empty_cache", "done", "root", 0.0, Target(all=True), results=results)

    renderer, release = Renderer(), threading.Event()
    before = asyncio.ensure_future(renderer.render(lambda: b"%d" % release.wait()))
    routes: Any = ActionRoutes
    replies = [routes(None, NoAudit(), None, renderer, None)._recorded(action) for _ in range(100)]
    waiting = [asyncio.ensure_future(reply) for reply in replies]
    await asyncio.sleep(0)
    assert not built, "nothing is kept for a request that waits"
    release.set()
    assert len({id((await reply).body) for reply in waiting}) == 1
    await before
    renderer.close()
    assert built == ["1"]
