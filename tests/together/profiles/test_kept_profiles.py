"""Profiles over HTTP: who may send one, who sees it, and what stays of it."""

from __future__ import annotations

import json
from typing import Any

from tests.support.profile_documents import Reporter, profile
from tests.support.running_exporter import ACTIONS, RunningExporter, problem, running_exporter

PROFILES = "/api/v1/profiles"


def asked(exporter: RunningExporter, **changes: Any) -> Any:
    wanted = {"action": "profile", "target": {"all": True}, "wait_seconds": 0, **changes}
    answer = exporter.act(**wanted)
    assert answer.status == 202, answer.body
    return json.loads(answer.body)


def test_a_profile_for_a_command_is_listed_and_named_in_the_result() -> None:
    with running_exporter() as exporter:
        reporter = Reporter(exporter)
        action = asked(exporter, duration_seconds=5)
        command = reporter.command()
        assert (command["action"], command["duration_seconds"]) == ("profile", 5)
        answer = reporter.send(profile(command["id"]))
        assert answer.status == 201, answer.body
        profile_id = json.loads(answer.body)["id"]
        assert json.loads(reporter.send(profile(command["id"])).body)["id"] == profile_id
        reporter.finish(command, "another")

        (row,) = exporter.document(f"{ACTIONS}/{action['id']}")["results"]
        assert (row["outcome"], row["profile"]) == ("done", profile_id)
        (listed,) = exporter.document(PROFILES)["profiles"]
        assert (listed["id"], listed["cause"], listed["pid"]) == (profile_id, "action", 100)
        assert listed["devices"][0]["allocated_bytes"] == 700
        found = exporter.document(f"{PROFILES}/{profile_id}")
        assert sum(row["bytes"] for row in found["rows"]) == 700
        problem(reporter.send(profile(command["id"])), 409)  # the command has ended
