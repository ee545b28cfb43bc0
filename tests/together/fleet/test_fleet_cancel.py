"""Canceling an action by the API."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from gpumem_client.wire.protocol import MODES
from tests.support.builders import UUIDS, report, sample
from tests.support.running_exporter import ACTIONS, RunningExporter, problem, running_exporter


@pytest.fixture
def exporter() -> Iterator[RunningExporter]:
    """An exporter with two reporters that can wait for a step."""
    with running_exporter(report_interval=20, report_expiry=60) as running:
        for pid in (1, 2):
            assert running.report(report(pid, devices=(sample(UUIDS[0], 10, 7),), modes=MODES)).status == 200
        yield running


def test_an_action_that_has_not_started_is_canceled_in_processes_that_wait(
    exporter: RunningExporter,
) -> None:
    requested = exporter.act(action="empty_cache", target={"all": True}, mode="step", wait_seconds=0)
    action_id = json.loads(requested.body)["id"]
    fetched = exporter.report(report(1, sequence=2, devices=(sample(UUIDS[0], 10, 7),), modes=MODES))
    assert [command["id"] for command in json.loads(fetched.body)["commands"]] == [action_id]

    answer = exporter.request("DELETE", f"{ACTIONS}/{action_id}")
    assert answer.status == 202
    (row,) = json.loads(answer.body)["results"]
    assert (row["pid"], row["outcome"]) == (2, "refused")
    assert "loopback:uid=" in row["reason"]

    reply = exporter.report(
        report(1, sequence=3, devices=(sample(UUIDS[0], 10, 7),), modes=MODES, waiting=(action_id,))
    )
    assert json.loads(reply.body)["cancelled"] == [action_id]
    nothing = exporter.report(report(2, sequence=2, devices=(sample(UUIDS[0], 10, 7),), modes=MODES))
    assert "commands" not in json.loads(nothing.body)


def test_a_finished_action_cannot_be_canceled_and_an_unknown_one_is_404(exporter: RunningExporter) -> None:
    done = json.loads(exporter.act(action="empty_cache", target={"pid": 1}, dry_run=True).body)
    del done["suggested"], done["when"]  # only the reply to the request has them
    answer = exporter.request("DELETE", f"{ACTIONS}/{done['id']}")
    assert (answer.status, json.loads(answer.body)) == (200, done)
    problem(exporter.request("DELETE", f"{ACTIONS}/unknown"), 404)
