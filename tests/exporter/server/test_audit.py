"""Actions before a restart: an action that cannot be recalled is logged and delays no request."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_exporter.events.model import Event, Query
from gpumem_exporter.server.api.audit import Audit


async def test_unreadable_earlier_actions_are_logged_and_delay_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def pages(_: Query, max_rows: int) -> list[Event]:
        raise ValueError("no JSON")

    recorder: Any = SimpleNamespace(log=SimpleNamespace(pages=pages))
    dispatcher: Any = None
    audit = Audit(recorder, durable=True, wall_clock=lambda: 1e9, count=lambda _: None, poll_soon=lambda: None)
    await audit.restore(dispatcher)
    waiting = asyncio.ensure_future(audit.wait_until_restored())
    await asyncio.sleep(0)
    assert waiting.done()
    assert "no JSON" in caplog.text
