from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.cli.commands import actions
from gpumem_exporter.cli.commands.actions import exit_code
from gpumem_exporter.cli.main import main
from gpumem_exporter.cli.render.action_tables import action_tables
from tests.support.fleet_builders import action, row
from tests.support.golden import assert_golden, printed


def _result(**changes: Any) -> dict[str, Any]:
    sizes: dict[str, Any] = {"reserved_before_bytes": 3 << 30, "reserved_after_bytes": 1 << 30, "freed_bytes": 2 << 30}
    return {**row(4711, workload="llm", duration_seconds=0.0031, **sizes), **changes}


def _printed(action: dict[str, Any], *, dry_run: bool = False, width: int = 80) -> list[str]:
    return printed(*action_tables(action, dry_run=dry_run), width=width)


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the exporter, and record the requests that it would receive."""
    bodies: list[dict[str, Any]] = []

    class Api:
        def __enter__(self) -> Api:
            return self

        def __exit__(self, *_: object) -> None: ...

        def act(self, body: dict[str, Any], **_: object) -> dict[str, Any]:
            bodies.append(body)
            return action(_result())

    monkeypatch.setattr(actions, "open_api", lambda *_: Api())
    return bodies


@pytest.mark.parametrize(
    ("words", "target"),
    [
        ("--all", {"all": True}),
        ("--gpu 0:1 --rank 3", {"gpu": "0:1", "rank": "3"}),
        ("--pid 1@4026532007", {"pid": "1@4026532007"}),
        ("--uuid GPU-1 --pid 7 --workload llm", {"uuid": "GPU-1", "pid": 7, "workload": "llm"}),
        ("--workload=", {"workload": ""}),
        ("--gpu 0 --gpu 1,2 --pid 7,8 --user ada", {"gpu": ["0", "1", "2"], "pid": [7, 8], "user": "ada"}),
    ],
)
def test_the_request_has_the_target(requested: list[dict[str, Any]], words: str, target: dict[str, Any]) -> None:
    assert main(["gc", "--json", *words.split()]) == 0
    assert requested[0]["target"] == target


def test_the_request_has_every_option(requested: list[dict[str, Any]]) -> None:
    words = "--all --group --gc --deadline 5 --reason room --json"
    assert main(["clear", "--dry-run", *words.split()]) == 0
    assert main(["clear", "--settle", "3", *words.split()]) == 0
    assert main(["terminate", "--pid", "7", "--json"]) == 0
    options = {"action": "empty_cache", "target": {"all": True}, "mode": "step", "group": True, "force": False}
    options |= {"collect_garbage": True, "deadline_seconds": 5.0, "reason": "room"}
    terminate = {"action": "terminate", "target": {"pid": 7}, "force": False, "deadline_seconds": 30.0}
    assert requested == [
        {**options, "dry_run": True},
        {**options, "dry_run": False, "settle_seconds": 3.0},
        {**terminate, "dry_run": False, "reason": ""},
    ]


@pytest.mark.parametrize(
    ("answer", "waited", "code"),
    [
        (action(_result()), True, 0),
        (action(_result(), _result(outcome="refused"), state="failed"), True, 1),
        (action(_result(outcome="expired"), state="expired"), True, 1),
        (action(state="queued"), True, 1),
        (action(state="queued"), False, 0),
        (action(_result(), state="running"), False, 0),
        (action(_result(outcome="gone"), state="running"), False, 1),
        (action(state="failed"), True, 1),
        (action(_result(), state="cancelled"), True, 1),
    ],
)
def test_the_exit_code_is_0_only_when_every_result_is_done(answer: dict[str, Any], waited: bool, code: int) -> None:
    assert exit_code(answer, waited=waited) == code


@pytest.mark.parametrize(
    ("pids", "still_free", "line"),
    [
        ((1, 1), (0, 0), "Freed 4.0 GiB; 0 B of it is still free after 10 s: the job reserved it again."),
        ((1, 2), (0, 0), "Freed 4.0 GiB; 0 B of it is still free after 10 s: the jobs reserved it again."),
        ((1, 1), (1, 0), "Freed 4.0 GiB; 1.0 GiB of it is still free after 10 s: the job reserved the rest again."),
        ((1, 1), (2, 2), "Freed 4.0 GiB; 4.0 GiB of it is still free after 10 s."),
        ((1, 1), (1, None), "Freed 4.0 GiB; at least 1.0 GiB of it is still free after 10 s."),
        ((1, 1), (None, None), "Freed 4.0 GiB in 1 of 1 process."),
    ],
)
def test_the_last_line_of_a_settled_clear_is_what_stayed_free(
    pids: tuple[int, int], still_free: tuple[int | None, int | None], line: str
) -> None:
    sizes = [None if gib is None else gib << 30 for gib in still_free]
    results = [
        _result(pid=pid, gpu=str(gpu), still_free_bytes=size)
        for gpu, (pid, size) in enumerate(zip(pids, sizes, strict=True))
    ]
    known = [size for size in sizes if size is not None]
    totals = {"settle_seconds": 10.0, "still_free_bytes": sum(known) if known else None}
    assert _printed({**action(*results), **totals}, width=120)[-1] == line


def test_results_are_sorted_by_workload_and_rank() -> None:
    lines = _printed(action(*(_result(pid=int(rank) + 1, rank=rank) for rank in ("10", "2", "0"))))
    assert [line.split()[2] for line in lines[1:4]] == ["0", "2", "10"]


def test_the_table_fits_in_80_columns_and_cuts_only_the_workload() -> None:
    result = _result(
        pid=4194304,
        workload="a-workload-with-quite-a-long-name-of-its-own",
        rank="1023",
        gpu="7:6",
        outcome="unsupported",
        reserved_before_bytes=1023 << 30,
        reserved_after_bytes=1023 << 20,
        freed_bytes=1023 << 30,
    )
    heading, row, *_ = _printed(action(result))
    assert heading.split() == ["pid", "workload", "rank", "gpu", "outcome", "before", "after", "freed", "took"]
    assert len(row) <= 80
    for cell in ("4194304", "1023", "7:6", "unsupported", "1023 GiB", "1023 MiB", "3.1 ms"):
        assert cell in row


def test_text_of_the_exporter_cannot_control_the_terminal() -> None:
    lines = _printed(action(_result(workload="[red]x[/] \x1b[2J", outcome="failed", reason="a\nb\x07"), state="failed"))
    text = "\n".join(lines)
    assert "[red]x[/]" in text
    assert "\x1b" not in text
    assert any(line.endswith(" a?b?") for line in lines)


def test_the_output_of_each_action() -> None:
    refused = _result(outcome="refused", reason="disabled by the program", freed_bytes=None)
    collected = _result(allocated_before_bytes=3 << 30, allocated_after_bytes=1 << 30, freed_bytes=0)
    grown = _result(allocated_before_bytes=1 << 30, allocated_after_bytes=3 << 30, freed_bytes=0)
    largest = [{"size_bytes": 1 << 30, "frame": "train.py:7 step"}]
    written = _result(snapshot={"path": "/tmp/s.pickle", "size_bytes": 5 << 20, "largest": largest}, freed_bytes=None)
    cases = {
        "done": action(_result(), _result(gpu="1", freed_bytes=1 << 29), _result(pid=4712, rank="1")),
        "refused": action(refused, {**refused, "gpu": "1"}, _result(pid=4712), state="failed"),
        "not measured": action(_result(freed_bytes=None)),
        "not finished": action(state="running"),
        "garbage": action(collected, _result(pid=4712, freed_bytes=0), action="collect_garbage"),
        "garbage, grown": action(grown, action="collect_garbage"),
        "garbage, not measured": action(_result(), action="collect_garbage"),
        "peaks": action(_result(freed_bytes=0), action="reset_peak"),
        "snapshot": action(written, action="snapshot"),
        "fraction": action(_result(), action="set_memory_fraction"),
    }
    parts = [
        f"== {name}{', dry run' if dry_run else ''}\n" + "\n".join(_printed(action, dry_run=dry_run)) + "\n"
        for name, action in cases.items()
        for dry_run in (False, True)
    ]
    assert_golden("actions.txt", "\n".join(parts))
