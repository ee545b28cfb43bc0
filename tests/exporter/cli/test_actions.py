from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.actions.kinds import KINDS
from gpumem_exporter.cli import usage
from gpumem_exporter.cli.commands.actions import exit_code
from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.main import main
from tests.support.builders.fleet_builders import ScriptedExporter, action, row
from tests.support.truth.golden import assert_golden, printed


def _result(**changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"reserved_before_bytes": 3 << 30, "reserved_after_bytes": 1 << 30, "freed_bytes": 2 << 30}
    return {**row(4711, workload="llm", duration_seconds=0.0031, **sizes), **changes}


def _printed(action: dict[str, Any]) -> list[str]:
    """Return the lines of a terminal with 80 columns."""
    return printed(*action_tables(action), width=80)


@pytest.fixture
def exporter(monkeypatch: pytest.MonkeyPatch) -> ScriptedExporter:
    """Replace the exporter."""
    scripted = ScriptedExporter(submits=[{**action(_result()), "settle_seconds": 0.0}])
    monkeypatch.setattr(usage, "ExporterApi", lambda *_, **__: scripted)
    return scripted


def test_the_request_has_every_option(exporter: ScriptedExporter) -> None:
    words = "--all --mode step --gc --deadline 5 --reason room --json"
    assert main(["clear", "--dry-run", *words.split()]) == 0
    assert main(["clear", "--settle", "3", *words.split()]) == 0
    assert main(["terminate", "--pid", "7", "--yes", "--json"]) == 0
    options = {"action": "empty_cache", "target": {"all": True}, "mode": "step", "force": False}
    options |= {"collect_garbage": True, "deadline_seconds": 5.0, "reason": "room"}
    terminate = {"action": "terminate", "target": {"pid": 7}, "force": False, "grace_seconds": 30.0}
    assert exporter.requests_of("submit") == [
        {**options, "dry_run": True},
        {**options, "dry_run": False, "settle_seconds": 3.0},
        {**terminate, "dry_run": False, "reason": ""},
    ]


def test_a_group_is_mode_step_with_a_warning(exporter: ScriptedExporter, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["clear", "--all", "--group", "--json"]) == 0
    assert "--group is deprecated" in capsys.readouterr().err
    assert main(["clear", "--all", "--json"]) == 0
    group, plain = exporter.requests_of("submit")
    assert group["group"] is True
    assert not plain.keys() & {"mode", "group", "deadline_seconds"}, "the exporter's choice"


@pytest.mark.parametrize(
    ("answer", "waited", "code"),
    [
        (action(_result()), True, 0),
        (action(_result(), _result(outcome="refused"), state="failed"), True, 1),
        (action(state="queued"), True, 1),
        (action(state="queued"), False, 0),
        (action(_result(), state="running"), False, 0),
        (action(_result(outcome="gone"), state="running"), False, 1),
        (action(state="failed"), True, 1),
        (action(), True, 0),
        (action(_result(), state="cancelled"), True, 1),
    ],
)
def test_the_exit_code_is_0_only_when_every_result_is_done(answer: dict[str, Any], waited: bool, code: int) -> None:
    assert exit_code(answer, waited=waited) == code


def test_the_output_of_each_action() -> None:
    refused = _result(outcome="refused", reason="disabled by the program", freed_bytes=None)
    collected = _result(allocated_before_bytes=3 << 30, allocated_after_bytes=1 << 30)
    grown = _result(allocated_before_bytes=1 << 30, allocated_after_bytes=3 << 30)
    path = "/tmp/gpumem-snapshots-1001/llm-4711-20261123T041630.pickle"
    written = _result(snapshot={"path": path, "size_bytes": 5 << 20}, freed_bytes=None)
    limited = _result(limit_bytes=38 << 30, freed_bytes=None)
    unnamed = {"workload": "", "rank": "", "job": "python train.py"}
    settled = _result(still_free_bytes=1 << 30)
    widest = _result(
        pid=4194304,
        workload="[red]\x1b[2J a-workload-with-quite-a-long-name-of-its-own",
        rank="1023",
        gpu="7:6",
        outcome="unsupported",
        reason="a\nb\x07",
        reserved_before_bytes=1023 << 30,
        reserved_after_bytes=1023 << 20,
        freed_bytes=1023 << 30,
        still_free_bytes=1023 << 30,
    )
    cases = {
        "clear": action(_result(), _result(gpu="1", freed_bytes=1 << 29), _result(pid=4712, rank="1")),
        "clear at a step": action(
            _result(mode="step", at_step=9), _result(pid=4712, mode="now"), deadline_seconds=30.0
        ),
        "clear, nothing": action(),
        "clear, settled": action(settled, {**settled, **unnamed, "pid": 4713}, settle_seconds=10.0),
        "clear, widest": action(widest, state="failed"),
        "clear, refused": action(refused, {**refused, "gpu": "1"}, _result(pid=4712), state="failed"),
        "clear, not measured": action(_result(freed_bytes=None)),
        "clear, not finished": action(state="running"),
        "gc": action(collected, _result(pid=4712), action="collect_garbage"),
        "gc, grown": action(grown, action="collect_garbage"),
        "gc, not measured": action(_result(), action="collect_garbage"),
        "reset-peak": action(_result(), action="reset_peak"),
        "snapshot": action(written, _result(gpu="1"), {**refused, "pid": 4712}, action="snapshot"),
        "fraction": action(limited, action="set_memory_fraction"),
        "terminate": action(_result(**unnamed), action="terminate"),
    }
    parts: list[str] = []
    for name, done in cases.items():
        would = [
            {**each, "outcome": each["outcome"].replace("done", KINDS[done["action"]].would)}
            for each in done["results"]
        ]
        parts += [f"== {name}", *_printed(done), ""]
        parts += [f"== {name}, dry run", *_printed({**done, "dry_run": True, "results": would}), ""]
    assert_golden("actions.txt", "\n".join(parts))
