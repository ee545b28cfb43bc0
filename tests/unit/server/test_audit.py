"""Actions before a restart: an action that cannot be recalled is logged and delays no request."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_exporter.events import Page, Query
from gpumem_exporter.server.api.audit import Audit


def test_unreadable_earlier_actions_are_logged_and_delay_no_request(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def read(_: Query) -> Future[Page]:
        page: Future[Page] = Future()
        page.set_exception(ValueError("no JSON"))
        return page

    recorder: Any = SimpleNamespace(log=SimpleNamespace(read=read))
    dispatcher: Any = None
    audit = Audit(recorder, durable=True, wall_clock=lambda: 1e9, on_lost=lambda _: None)

    async def recall() -> bool:
        await audit.recall(dispatcher)
        waiting = asyncio.ensure_future(audit.wait_until_recalled())
        await asyncio.sleep(0)
        return waiting.done()

    assert asyncio.run(recall())
    assert "no JSON" in caplog.text
