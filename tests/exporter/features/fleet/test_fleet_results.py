from __future__ import annotations

from typing import Any

from gpumem_exporter.cli.render.action_tables import action_tables
from gpumem_exporter.features.fleet.fleet_action import fleet_document
from tests.support.builders.fleet_builders import row
from tests.support.truth.golden import assert_golden, printed


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
