from __future__ import annotations

import json
import os
import signal
from typing import Any

import pytest

from gpumem_client.wire.errors import ExporterAnswerError, ExporterUnreachableError, ExporterUntrustedError
from gpumem_exporter.cli import action_dialog
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.features.fleet.fleet_action import fleet_document, requests_for
from gpumem_exporter.features.fleet.fleet_nodes import Selector
from gpumem_exporter.main import main
from tests.support.builders.fleet_builders import A, B, ScriptedExporter, action, process, row, serve_fleet, unreported
from tests.support.truth.golden import assert_golden, printed

SILENCE = ExporterUnreachableError("silent-x")
LISTED = {"processes": [process(1), process(2, workload="spared"), unreported(3)]}

PROCESSES = [
    process(1, gpus=("0", "1")),
    process(2, rank="1", gpus=("1",)),
    process("1@77", workload="other", rank=""),
    unreported(9, gpus=("1",)),
]


def run(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    exporters: dict[Any, ScriptedExporter],
    *words: str,
    pids: str = "1",
) -> tuple[int, list[Any]]:
    """Run a command on processes of every exporter. Return its exit code and its results."""
    serve_fleet(monkeypatch, exporters, [{"instance": each.instance, "pid": pid} for each in exporters for pid in pids])
    monkeypatch.setattr(action_dialog, "_LONGEST_PAUSE_SECONDS", 0.01)
    code = main(["fleet", *(words or ("clear",)), "--query", "q", "--json"])
    return code, json.loads(capsys.readouterr().out)["results"]


def targets(*selectors: Selector, name: str = "empty_cache") -> list[dict[str, Any]]:
    requests, _ = requests_for(name, A, selectors, PROCESSES)
    return [each.target for each in requests]


def pids(*selectors: Selector, name: str = "empty_cache") -> list[list[Any]]:
    return [each["pid"] for each in targets(*selectors, name=name)]


def test_labels_narrow_each_other() -> None:
    assert pids(Selector(pid="1@77")) == [["1@77"]]
    assert pids(Selector(workload="train", rank="1")) == [[2]]
    assert pids(Selector(gpu="1")) == [[1, 2]]
    assert pids(Selector(pid=1, uuid="GPU-0", gpu="0")) == [[1]]
    assert pids(Selector(pid=2, gpu="0")) == []


def test_the_processes_of_a_node_are_one_request_whose_labels_exclude_later_processes_with_their_pids() -> None:
    both = (Selector(pid=1, gpu="0"), Selector(pid=1, gpu="1"), Selector(rank="1"))
    assert targets(*both) == [{"pid": [1, 2], "workload": ["train"], "rank": ["0", "1"]}]


def test_only_an_action_on_devices_is_of_the_devices_that_the_query_names() -> None:
    of_train = {"workload": ["train"], "rank": ["0"]}
    (first, second) = (Selector(pid=1, gpu=gpu) for gpu in "01")
    assert targets(first, second, name="reset_peak") == [{"pid": [1], **of_train, "uuid": ["GPU-0", "GPU-1"]}]
    assert targets(first, Selector(pid=1), name="reset_peak") == [{"pid": [1], **of_train}]
    assert pids(first, Selector(pid=2, gpu="1"), name="reset_peak") == [[1], [2]]
    assert pids(first, Selector(pid=2, gpu="1")) == [[1, 2]]


@pytest.mark.parametrize("selector", [Selector(pid=1, workload="before"), Selector(pid=5), Selector(pid=9)])
def test_a_selector_without_a_process_that_can_act_has_an_outcome(selector: Selector) -> None:
    requests, (failed,) = requests_for("empty_cache", A, [selector], PROCESSES)
    assert (requests, failed["instance"], failed["outcome"]) == ([], A.instance, "gone")
    assert failed["reason"]


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_termination_reaches_the_selected_processes_alone_and_a_refusal_is_a_failure(
    dry_run: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also a process that does not report can be terminated."""
    outcome = "would_terminate" if dry_run else "done"
    answers = [action(row(pid, outcome), id=f"a{pid}") for pid in (1, 3)]
    allows = ScriptedExporter(document=LISTED, submits=[*answers])
    refuses = ScriptedExporter(document=LISTED, submits=[ExporterAnswerError(403, "--action.allow")])
    fleet = {A: allows, B: refuses}
    code, rows = run(monkeypatch, capsys, fleet, "terminate", "--dry-run" if dry_run else "--yes", pids="13")
    assert code == 1
    sent = [each for exporter in fleet.values() for each in exporter.requests_of("submit")]
    reporting = {"pid": [1], "workload": ["train"], "rank": ["0"]}
    assert sorted(map(str, (each["target"] for each in sent))) == sorted(map(str, [reporting, {"pid": [3]}] * 2))
    assert {(each["action"], each["dry_run"]) for each in sent} == {("terminate", dry_run)}
    assert {(each["instance"], each["pid"], each["outcome"]) for each in rows} == {
        *((A.instance, pid, outcome) for pid in (1, 3)),
        *((B.instance, pid, "refused") for pid in (1, 3)),
    }
    assert {each["reason"] for each in rows if each["outcome"] == "refused"} == {"--action.allow"}


@pytest.mark.parametrize(
    ("error", "outcome", "reason"),
    [
        (ExporterAnswerError(404, "nothing matches pid=1"), "refused", "nothing matches pid=1"),
        (ExporterAnswerError(401, "token-needed"), "refused", "token-needed"),
        (ExporterAnswerError(500, "see-log"), "failed", "see-log"),
        (SILENCE, "failed", "silent-x"),
        (ExporterUntrustedError("uid 1001"), "failed", "uid 1001"),
    ],
)
def test_an_error_of_one_exporter_is_the_outcome_of_its_processes(
    error: Any, outcome: str, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = {A: ScriptedExporter(document=LISTED, submits=[error]), B: ScriptedExporter(document=LISTED)}
    fleet[B].submits = [action(row(1), row(2, workload="spared"))]
    code, rows = run(monkeypatch, capsys, fleet, pids="12")
    assert code == 1
    assert [(each["instance"], each["pid"], each["outcome"]) for each in rows if each["instance"] == A.instance] == [
        (A.instance, 2, outcome),
        (A.instance, 1, outcome),
    ]
    assert [each["outcome"] for each in rows if each["instance"] == B.instance] == ["done", "done"]
    assert all(reason in each["reason"] for each in rows if each["instance"] == A.instance)


@pytest.mark.parametrize(
    ("document", "reason"), [(SILENCE, "silent-x"), ({"hello": "world"}, f"{A.url} is not a gpumem-exporter")]
)
def test_a_node_that_does_not_name_its_processes_fails_and_the_others_act(
    document: Any, reason: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fleet = {A: ScriptedExporter(document=document, url=A.url), B: ScriptedExporter(document=LISTED)}
    fleet[B].submits = [action(row(1))]
    code, (failed, done) = run(monkeypatch, capsys, fleet)
    assert (code, failed["outcome"], done["outcome"]) == (1, "failed", "done")
    assert reason in failed["reason"]
    assert failed["pid"] == 1


def test_a_process_without_a_result_at_the_end_expires(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(action_dialog, "longest_seconds", lambda _: 0.05)
    queued = action(row(1), state="running")
    exporter = ScriptedExporter(document=LISTED, submits=[queued], later=[queued])
    code, (expired, done) = run(monkeypatch, capsys, {A: exporter}, pids="12")
    assert (code, done["pid"], done["outcome"]) == (1, 1, "done")
    assert (expired["pid"], expired["outcome"]) == (2, "expired")
    assert "a1" in expired["reason"]


def test_ctrl_c_cancels_what_was_requested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    canceled = action(row(1, "refused", reason="cancelled"), state="cancelled")
    running = action(state="running")
    exporter = ScriptedExporter(
        document=LISTED,
        submits=[running],
        later=[running],
        cancels=[canceled],
        on_submit=lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    code, (result,) = run(monkeypatch, capsys, {A: exporter})
    assert (code, result["outcome"], result["reason"]) == (1, "refused", "cancelled")
    assert len(exporter.requests_of("cancel")) == 1


def test_many_processes_are_refused_before_any_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = ScriptedExporter(document=LISTED)
    serve_fleet(monkeypatch, {A: exporter}, [{"instance": A.instance, "gpu": "0"}])
    assert main(["fleet", "terminate", "--yes", "--query", "q", "--max-processes", "2"]) == 1
    assert "3 processes, more than --max-processes 2" in capsys.readouterr().err
    serve_fleet(monkeypatch, {A: exporter}, [{"instance": A.instance}])
    assert main(["fleet", "terminate", "--yes", "--query", "q"]) == 2
    assert "sum by (instance, pid)" in capsys.readouterr().err
    assert exporter.requests_of("submit") == []


def on(instance: str, pid: int | None = 1, outcome: str = "done", **changes: Any) -> dict[str, Any]:
    known = {"freed_bytes": 2 << 30, "reserved_before_bytes": 3 << 30, "reserved_after_bytes": 1 << 30}
    return {"instance": instance, "action_id": "a1", **row(1, outcome, **known)} | {
        "pid": pid,
        **changes,
    }


def refused(instance: str, pid: int | None, reason: str, **changes: Any) -> dict[str, Any]:
    nothing = {"freed_bytes": None, "reserved_before_bytes": None, "reserved_after_bytes": None}
    return on(instance, pid, "refused", reason=reason, **nothing, **changes)


CLEAR = {"action": "empty_cache", "mode": "now", "dry_run": False}
MANY_REFUSED = [
    *(refused("node1", pid, "no-token") for pid in range(1, 11)),
    refused("node2", 5, "no-token"),
    refused("node3", None, "no-answer", workload=None),
    on("node4"),
]
AT_STEP = [on("node1", outcome="would_clear", mode="step", at_step=9), on("node2", outcome="would_clear", mode="now")]


def test_the_output_of_fleet_commands() -> None:
    actions = {
        "clear": fleet_document(CLEAR, [on("node1"), on("node2"), on("node2", gpu="1")]),
        "clear, refused": fleet_document(CLEAR, MANY_REFUSED),
        "clear, nothing selected": fleet_document(CLEAR, []),
        "clear, dry run": fleet_document({**CLEAR, "dry_run": True}, AT_STEP),
    }
    parts = [f"== {name}\n" + "\n".join(printed(*action_tables(each), width=10_000)) for name, each in actions.items()]
    document = actions["clear, refused"]
    assert [row["instance"] for row in document["results"]] == [*["node1"] * 10, "node2", "node3", "node4"]
    assert (document["state"], document["freed_bytes"], document["still_free_bytes"]) == ("failed", 2 << 30, None)
    assert_golden("fleet.txt", "\n\n".join(parts) + "\n")
