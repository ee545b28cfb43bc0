"""Actions before a restart: an action that cannot be recalled is logged and delays no request."""

from __future__ import annotations

import asyncio
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_exporter.events import Event, Page, Query
from gpumem_exporter.server.api.audit import Audit
from gpumem_exporter.server.api.event_writes import read_all_events


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

    async def restore() -> bool:
        await audit.restore(dispatcher)
        waiting = asyncio.ensure_future(audit.wait_until_restored())
        await asyncio.sleep(0)
        return waiting.done()

    assert asyncio.run(restore())
    assert "no JSON" in caplog.text


def test_of_a_long_audit_trail_the_latest_actions_are_restored() -> None:
    stored = [Event("action", 0.0, id=number, detail={"results": [{}] * 9}) for number in range(1, 101)]

    def read(query: Query) -> Future[Page]:
        found = [event for event in stored if event.id > (query.after or 0)]
        page: Future[Page] = Future()
        page.set_result(Page(tuple(found[:30]), found[:30][-1].id, more=len(found) > 30))
        return page

    log: Any = SimpleNamespace(read=read)
    recalled = asyncio.run(read_all_events(log, Query(after=0), max_rows=55))
    assert [event.id for event in recalled] == [96, 97, 98, 99, 100]
    assert len(asyncio.run(read_all_events(log, Query(after=0)))) == 100
