"""Actions before a restart."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_exporter.actions.audit import Audit
from gpumem_exporter.core.event import Event, Query
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.servers.running_exporter import ACTIONS, problem, running_exporter


async def test_unreadable_earlier_actions_are_logged_and_delay_no_request(caplog: pytest.LogCaptureFixture) -> None:
    async def pages(_: Query, last: int) -> list[Event]:
        raise ValueError("no JSON")

    journal: Any = SimpleNamespace(pages=pages)
    dispatcher: Any = None
    audit = Audit(journal, durable=True, wall_clock=lambda: 1e9, count=lambda _: None, poll_soon=lambda: None)
    await audit.restore(dispatcher)
    waiting = asyncio.ensure_future(audit.wait_until_restored())
    await asyncio.sleep(0)
    assert waiting.done()
    assert "no JSON" in caplog.text


def test_after_a_restart_an_action_without_an_end_has_failed_and_its_key_is_known(tmp_path: Path) -> None:
    request = {"action": "empty_cache", "target": {"pid": 7}, "wait_seconds": 0, "reason": "room"}
    answers: list[dict[str, Any]] = []
    for _ in range(2):
        with running_exporter(storage_path=str(tmp_path / "state")) as exporter:
            exporter.report(report(7, devices=(sample(UUIDS[0]),)))
            answers.append(json.loads(exporter.request("POST", ACTIONS, request, Idempotency_Key="k").body))
            other = exporter.request("POST", ACTIONS, {**request, "target": {"pid": 8}}, Idempotency_Key="k")
            assert "'k'" in problem(other, 409)["detail"]
    first, again = answers
    assert (again["id"], again["state"], again["reason"]) == (first["id"], "failed", "room")
    assert [(row["pid"], row["reason_code"]) for row in again["results"]] == [(7, "exporter_restarted")]
