from __future__ import annotations

import json
from typing import Any

import pytest

from gpumem_exporter.cli.fleet.action import FleetResult
from gpumem_exporter.cli.fleet.overview import Overview
from gpumem_exporter.cli.fleet.selection import Failure
from gpumem_exporter.cli.render.terminal import open_console, show
from tests.support.fleet_builders import A, B, C, row
from tests.support.golden import assert_golden


def on(instance: str, pid: int | None = 1, outcome: str = "done", **changes: Any) -> dict[str, Any]:
    known = {"freed_bytes": 2 << 30, "reserved_before_bytes": 3 << 30, "reserved_after_bytes": 1 << 30}
    return {"instance": instance, "url": f"http://{instance}", "action_id": "a1", **row(1, outcome, **known)} | {
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
HALF_DONE = [on("node1", rank="0"), refused("node2", 1, "cancelled", rank="1")]


def test_warnings_of_prometheus_go_to_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    FleetResult(CLEAR, []).print(["store b\nis down"], query="q", as_json=False)
    captured = capsys.readouterr()
    assert "store b" not in captured.out
    assert captured.err.startswith("warning: ")
    assert captured.err.endswith(": store b is down\n")


def test_json_has_every_row_and_the_sum(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [on("node1"), refused("node2", None, "no")]
    FleetResult(CLEAR, rows, 7, "why").print(["w"], query="q > 1", as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "action": "empty_cache",
        "query": "q > 1",
        "mode": "now",
        "dry_run": False,
        "state": "failed",
        "at_step": 7,
        "called_off": "why",
        "results": rows,
        "freed_bytes": 2 << 30,
        "still_free_bytes": None,
        "settle_seconds": 0.0,
        "warnings": ["w"],
        "subject": "train (2 ranks)",
        "sentence": "Freed 2.0 GiB in train rank 0. 1 of 2 processes acted.",
    }
    FleetResult(CLEAR, [], 7, "why").print([], query="q > 1", as_json=True)
    assert json.loads(capsys.readouterr().out)["freed_bytes"] is None


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
    "idle_cache_bytes": 6 << 30,
    "allocatable_bytes": 26 << 30,
}
LOST = {**GPU, "gpu": "1", "up": False, "error": "lost", "memory": None, "utilization_ratio": None}
LOST |= {"ledger": None, "idle_cache_bytes": None, "allocatable_bytes": None}


def shared_devices(source: str) -> Overview:
    """Return an overview of two exporters that know the same two devices."""
    first, second = {**GPU, "uuid": "GPU-1"}, {**GPU, "gpu": "1", "uuid": "GPU-2"}
    unknown = {**first, "memory": None, "ledger": None}
    return Overview({A: devices(unknown, second, source=source), C: devices(first, second, source=source)})


def test_the_document_of_an_overview_names_exporters_that_do_not_answer() -> None:
    overview = Overview({A: devices(GPU, LOST), B: Failure("failed", "no-answer")})
    assert not overview.complete
    assert overview.document()["exporters"][1] == {
        "instance": "node2:9844",
        "url": "http://node2:9844",
        "error": "no-answer",
        "devices": [],
    }


def test_the_output_of_fleet_commands(capsys: pytest.CaptureFixture[str]) -> None:
    actions = {
        "clear": FleetResult(CLEAR, [on("node1"), on("node2"), on("node2", gpu="1")]),
        "clear, refused": FleetResult(CLEAR, MANY_REFUSED),
        "clear, nothing selected": FleetResult(CLEAR, []),
        "clear of a group": FleetResult(CLEAR, HALF_DONE[:1], 90),
        "clear of a group, dry run": FleetResult({**CLEAR, "dry_run": True}, HALF_DONE[:1], 90),
        "clear of a group, half done": FleetResult(CLEAR, HALF_DONE, 90, "node2: refused: no-token"),
        "clear of a group, not done": FleetResult(CLEAR, HALF_DONE[1:], 90, "node2: refused: no-token"),
    }
    overviews = {
        "info": Overview({A: devices(GPU, LOST), B: Failure("failed", "no-answer"), C: devices(GPU)}),
        "info, reclaimable not known": Overview(
            {A: devices({**GPU, "ledger": {"torch_fragmented": 9 << 30}, "idle_cache_bytes": None})}
        ),
        "info, shared devices": shared_devices("nvml"),
        "info, demo": shared_devices("demo"),
        "info, no driver": Overview({A: {"source": "nvml", "nvml": {"up": False, "error": ""}, "devices": []}}),
        "info, nothing selected": Overview({}),
    }
    parts = []
    for name, result in actions.items():
        result.print(["store b is down"] if name == "clear" else [], query="q", as_json=False)
        captured = capsys.readouterr()
        parts.append(f"== {name}\n{captured.err}{captured.out}")
    for name, overview in overviews.items():
        show(open_console(), overview.parts(10_000))
        parts.append(f"== {name}\n{capsys.readouterr().out}")
    assert_golden("fleet.txt", "\n".join(parts))
