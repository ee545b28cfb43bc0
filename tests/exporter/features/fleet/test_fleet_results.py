from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.features.fleet.fleet_action import fleet_document, fleet_tables
from gpumem_exporter.features.fleet.prometheus import print_warnings
from tests.support.fleet_builders import row
from tests.support.golden import assert_golden, printed


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
AT_STEP = [on("node1", outcome="would_clear", mode="step", at_step=9), on("node2", outcome="would_clear", mode="now")]
HALF_DONE = [on("node1", rank="0"), refused("node2", 1, "cancelled", rank="1")]


def test_json_has_every_row_and_the_sum() -> None:
    rows = [on("node1"), refused("node2", None, "no")]
    document = fleet_document(CLEAR, rows, "q > 1", ["w"])
    assert document["results"] == rows
    told = {"query": "q > 1", "warnings": ["w"], "dry_run": False, "mode": "now"}
    assert document.items() >= {**told, "state": "failed", "freed_bytes": 2 << 30, "still_free_bytes": None}.items()
    assert fleet_document(CLEAR, [])["freed_bytes"] is None


def test_the_output_of_fleet_commands(capsys: pytest.CaptureFixture[str]) -> None:
    actions = {
        "clear": fleet_document(CLEAR, [on("node1"), on("node2"), on("node2", gpu="1")]),
        "clear, refused": fleet_document(CLEAR, MANY_REFUSED),
        "clear, nothing selected": fleet_document(CLEAR, []),
        "clear, half done": fleet_document(CLEAR, HALF_DONE),
        "clear, dry run": fleet_document({**CLEAR, "dry_run": True}, AT_STEP),
    }
    parts = []
    for name, document in actions.items():
        print_warnings(["store b\nis down"] if name == "clear" else [])
        lines = printed(*fleet_tables(document), width=10_000)
        parts.append("\n".join([f"== {name}", *capsys.readouterr().err.splitlines(), *lines, ""]))
    assert_golden("fleet.txt", "\n".join(parts))
