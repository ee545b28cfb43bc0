"""`actions list|show|cancel` against a scripted API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gpumem_exporter.cli import usage
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.main import main
from tests.support.builders.fleet_builders import row

GIB = 1 << 30
IDS = ("aa11" + "0" * 28, "aa22" + "0" * 28, "bb33" + "0" * 28)


def _action(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "id": IDS[number],
        "action": "empty_cache",
        "state": "done",
        "requested_by": "unix:uid=1001:pid=7",
        "created": "2026-03-04T12:00:00.000Z",
        "target": {"workload": "llm-pretrain"},
        "mode": "now",
        "group": False,
        "at_step": None,
        "dry_run": False,
        "reason": "make room",
        "freed_bytes": 20 * GIB,
        "still_free_bytes": 2 * GIB,
        "settle_seconds": 10.0,
        "settling": False,
        "waits_for": [],
        "results": [row(4711, workload="llm-pretrain", freed_bytes=20 * GIB, still_free_bytes=2 * GIB)],
        **changes,
    }


class _Api(ExporterApi):
    def __init__(self) -> None:
        super().__init__(("http://a",))
        queued: dict[str, Any] = {"state": "queued", "freed_bytes": None, "still_free_bytes": None, "results": []}
        peak = {"action": "reset_peak", "still_free_bytes": None}
        self.actions = [_action(0), _action(1, **queued, target={"all": True}), _action(2, **peak)]
        self.paths: list[str] = []
        self.jobs: dict[str, list[dict[str, Any]]] = {}

    def get(self, path: str, **_: Any) -> dict[str, Any]:
        self.paths.append(path)
        if path.startswith("/api/v1/jobs/"):
            return {"processes": self.jobs.get(path.rpartition("/")[2], [])}
        return {"actions": self.actions}

    def action(self, action_id: str) -> dict[str, Any]:
        return next(each for each in self.actions if each["id"] == action_id)

    def cancel(self, action_id: str) -> dict[str, Any]:
        action = self.action(action_id)
        if action["state"] == "queued":
            action["state"] = "cancelled"
        return action


@pytest.fixture
def api(monkeypatch: pytest.MonkeyPatch) -> _Api:
    scripted = _Api()
    monkeypatch.setattr(usage, "ExporterApi", lambda *_, **__: scripted)
    return scripted


def test_the_list_has_request_caller_outcome_and_sizes(api: _Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["actions", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    first, second, third = (" ".join(line.split()) for line in lines[1:])
    assert first.startswith("aa110000 03-0")
    assert first.endswith("clear workload=llm-pretrain uid 1001 done 20.0 GiB 2.0 GiB")
    assert second.endswith("clear all uid 1001 queued - -")
    assert third.endswith("reset-peak workload=llm-pretrain uid 1001 done - -")
    assert api.paths == ["/api/v1/actions?dry_run=false"]


def test_a_target_of_a_later_exporter_is_shown_as_far_as_it_is_known(
    api: _Api, capsys: pytest.CaptureFixture[str]
) -> None:
    api.actions[0]["target"]["partition"] = "a"
    assert main(["actions", "list"]) == main(["actions", "show", "aa1"]) == 0
    assert capsys.readouterr().out.count("workload=llm-pretrain") == 3


def test_the_filters_are_sent_by_the_names_of_the_api(api: _Api, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--action clear,gc --action reset-peak --state done --job llm~1 --json"
    assert main(["actions", "list", *words.split()]) == 0
    assert json.loads(capsys.readouterr().out) == {"actions": api.actions}
    query = "action=empty_cache%2Ccollect_garbage%2Creset_peak&state=done&job=llm~1&dry_run=false"
    assert api.paths == ["/api/v1/jobs/llm~1", f"/api/v1/actions?{query}"]


def test_a_job_may_be_named_by_its_id_of_slurm(api: _Api) -> None:
    api.jobs["4711"] = [{"job": "llm~1", "workload": "llm"}, {"job": "llm~1", "workload": "llm"}]
    assert main(["actions", "list", "--job", "4711"]) == 0
    assert api.paths[-1] == "/api/v1/actions?job=llm~1&dry_run=false"
    api.jobs["4711"].append({"job": "eval~2", "workload": "eval"})
    assert main(["actions", "list", "--job", "4711"]) == 2


def test_an_action_is_found_by_the_start_of_its_id(api: _Api, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["actions", "show", "aa1"]) == 0
    out = capsys.readouterr().out
    assert IDS[0] in out
    assert "make room" in out
    assert main(["actions", "show", "aa"]) == 2
    assert "2 actions" in capsys.readouterr().err
    for unknown in ("cc", ""):
        assert main(["actions", "cancel", unknown]) == 1
        assert repr(unknown) in capsys.readouterr().err
    assert len(api.paths) == 4


@pytest.mark.parametrize(("given", "state", "code"), [("aa22", "cancelled", 0), ("aa11", "done", 1)])
def test_cancel_fails_if_the_action_had_ended(
    api: _Api, given: str, state: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["actions", "cancel", given, "--json"]) == code
    assert json.loads(capsys.readouterr().out)["state"] == state
    assert api.paths
