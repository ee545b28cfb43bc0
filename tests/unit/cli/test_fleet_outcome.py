from __future__ import annotations

import json
from typing import Any

import pytest

from gpumem_exporter.cli.fleets.asks import Failure
from gpumem_exporter.cli.fleets.outcome import Outcome
from gpumem_exporter.cli.fleets.overview import Overview
from gpumem_exporter.cli.terminal import open_console, show
from tests.support.fleet_builders import A, B, C, row


def on(instance: str, pid: int | None = 1, outcome: str = "done", **changes: Any) -> dict[str, Any]:
    known = {"freed_bytes": 2 << 30, "reserved_before_bytes": 3 << 30, "reserved_after_bytes": 1 << 30}
    return {"instance": instance, "url": f"http://{instance}", "action_id": "a1", **row(1, outcome, **known)} | {
        "pid": pid,
        **changes,
    }


def refused(instance: str, pid: int | None, reason: str, **changes: Any) -> dict[str, Any]:
    nothing = {"freed_bytes": None, "reserved_before_bytes": None, "reserved_after_bytes": None}
    return on(instance, pid, "refused", reason=reason, **nothing, **changes)


def lines(outcome: Outcome, capsys: pytest.CaptureFixture[str], *warnings: str) -> list[str]:
    outcome.tell(warnings, query="q", as_json=False)
    return capsys.readouterr().out.splitlines()


def test_a_row_says_what_was_freed_where_and_equal_pids_on_two_nodes_are_two_processes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    printed = lines(Outcome("empty_cache", False, [on("node1"), on("node2"), on("node2", gpu="1")]), capsys)
    assert " ".join(printed[1].split()) == "node1 1 train 0 0 done 3.0 GiB 1.0 GiB 2.0 GiB -"
    assert len(printed) == 1 + 3 + 1
    assert printed[-1] == "Freed 6.0 GiB in 2 of 2 processes."
    assert lines(Outcome("empty_cache", True, [on("node1")]), capsys)[-1] == "Would free 2.0 GiB in 1 of 1 process."


def test_why_something_was_not_done_is_said_once_for_each_exporter_and_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [
        *(refused("node1", pid, "no token") for pid in range(1, 11)),
        refused("node2", 5, "no token"),
        refused("node3", None, "nobody answers", workload=None),
        on("node4"),
    ]
    printed = lines(Outcome("empty_cache", False, rows), capsys)
    assert printed[-4:] == [
        "node1: pid 1, 2, 3, 4, 5, 6, 7, 8 and others: refused: no token",
        "node2: pid 5: refused: no token",
        "node3: refused: nobody answers",
        "Freed 2.0 GiB in 1 of 13 processes.",
    ]


def test_a_group_that_was_called_off_says_who_had_acted_already(capsys: pytest.CaptureFixture[str]) -> None:
    half = [on("node1", rank="0"), refused("node2", 1, "cancelled", rank="1")]
    printed = lines(Outcome("empty_cache", False, half, 90, "node2: refused: no token"), capsys)
    assert "Called off: node2: refused: no token." in printed
    assert "Half done: rank 0 on node1 had acted; the others have not." in printed
    none = lines(Outcome("empty_cache", False, half[1:], 90, "why"), capsys)
    assert "Nobody has acted." in none
    whole = lines(Outcome("empty_cache", False, half[:1], 90), capsys)
    assert "All acted after step 90." in whole


def test_what_the_api_says_of_its_answer_goes_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    Outcome("empty_cache", False, []).tell(["store b\nis down"], query="q", as_json=False)
    captured = capsys.readouterr()
    assert captured.out == "The query names no process: there is nothing to do.\n"
    assert captured.err == "warning: Prometheus: store b is down\n"


def test_json_has_every_row_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [on("node1"), refused("node2", None, "no")]
    Outcome("empty_cache", False, rows, 7, "why").tell(["w"], query="q > 1", as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "action": "empty_cache",
        "query": "q > 1",
        "dry_run": False,
        "state": "failed",
        "at_step": 7,
        "called_off": "why",
        "results": rows,
        "freed_bytes": 2 << 30,
        "warnings": ["w"],
    }


def test_nothing_to_do_is_done_and_anything_undone_is_not() -> None:
    assert Outcome("empty_cache", False, []).done
    assert not Outcome("empty_cache", False, [on("a"), on("b", outcome="gone")]).done


def devices(*known: dict[str, Any], source: str = "nvml") -> dict[str, Any]:
    return {"source": source, "nvml": {"up": True, "error": ""}, "devices": list(known)}


GPU = {
    "gpu": "0",
    "name": "Some GPU",
    "mig_profile": "",
    "up": True,
    "memory": {"total_bytes": 80 << 30, "used_bytes": 60 << 30, "free_bytes": 20 << 30},
    "utilization_ratio": 0.5,
    "ledger": {"torch_reclaimable": 8 << 30, "torch_fragmented": 1 << 30},
}
LOST = {**GPU, "gpu": "1", "up": False, "error": "lost", "memory": None, "utilization_ratio": None, "ledger": None}


def test_an_overview_has_a_row_for_each_device_what_is_wrong_and_the_sums(capsys: pytest.CaptureFixture[str]) -> None:
    overview = Overview({A: devices(GPU, LOST), B: Failure("failed", "nobody answers"), C: devices(GPU)})
    assert not overview.complete
    show(open_console(), overview.tables())
    printed = capsys.readouterr().out.splitlines()
    assert [" ".join(line.split()) for line in printed[1:3]] == [
        "node1:9844 0 Some GPU 50 % 80.0 GiB 60.0 GiB 20.0 GiB 8.0 GiB 1.0 GiB",
        "node1:9844 1 Some GPU - - - - - -",
    ]
    assert printed[-3:] == [
        "node1:9844: gpu 1: lost",
        "node2:9844: nobody answers",
        "2 of 3 exporters, 3 devices: 120 GiB of 160 GiB used; a clear would give back 16.0 GiB.",
    ]
    show(open_console(), overview.screen())
    assert capsys.readouterr().out.splitlines()[0] == printed[-1]
    assert overview.document()["exporters"][1] == {
        "instance": "node2:9844",
        "url": "http://node2:9844",
        "error": "nobody answers",
        "devices": [],
    }


def test_of_devices_of_which_nobody_knows_it_an_overview_does_not_say_what_a_clear_would_give_back(
    capsys: pytest.CaptureFixture[str],
) -> None:
    unsplit = {**GPU, "ledger": {"torch_fragmented": 9 << 30}}
    show(open_console(), Overview({A: devices(unsplit)}).tables())
    printed = capsys.readouterr().out.splitlines()
    assert " ".join(printed[-2].split()).endswith("20.0 GiB - 9.0 GiB")
    assert printed[-1] == "1 of 1 exporters, 1 devices: 60.0 GiB of 80.0 GiB used."


def test_a_device_that_two_exporters_tell_of_counts_once_and_simulated_ones_are_told_apart_by_their_node(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One exporter under two names, or a sidecar beside the node's own."""

    def last_lines(source: str) -> list[str]:
        first, second = {**GPU, "uuid": "GPU-1"}, {**GPU, "gpu": "1", "uuid": "GPU-2"}
        unknown = {**first, "memory": None, "ledger": None}
        known = {A: devices(unknown, second, source=source), C: devices(first, second, source=source)}
        show(open_console(), Overview(known).tables())
        return capsys.readouterr().out.splitlines()[-2:]

    assert last_lines("nvml") == [
        "node1:9844 and node3:9844 tell of the same devices, which count once",
        "2 of 2 exporters, 2 devices: 120 GiB of 160 GiB used; a clear would give back 16.0 GiB.",
    ]
    assert last_lines("demo")[1] == (
        "2 of 2 exporters, 4 devices: 180 GiB of 240 GiB used; a clear would give back 24.0 GiB."
    )


def test_an_overview_says_what_is_a_demo_and_what_is_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    show(open_console(), Overview({A: devices(source="demo")}).tables())
    assert capsys.readouterr().out.startswith("DEMO")
    show(open_console(), Overview({}).tables())
    assert capsys.readouterr().out == "The query names no exporter.\n"
