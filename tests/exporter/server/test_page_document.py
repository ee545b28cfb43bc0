from __future__ import annotations

import json
from typing import Any

from gpumem_exporter.core.samples import ProcessKey, SilentReporter, Snapshot
from gpumem_exporter.server.api.health import HealthDocument
from gpumem_exporter.server.web.live import COLUMNS, LiveState
from gpumem_exporter.server.web.page import Page
from tests.support.builders import UUIDS, device, node, reporting, sample

A, B = UUIDS[:2]
HEALTH: HealthDocument = {
    "version": "1",
    "mode": "node",
    "source": "demo",
    "devices": 1,
    "processes": 0,
    "status": "degraded",
    "nvml": {"up": True, "error": "", "released": False},
    "checks": {
        "poller": {"status": "ok", "detail": "7 polls"},
        "events": {"status": "degraded", "detail": "the disk is full"},
    },
}


PAGE = Page("1", demo=True, telemetry_path="/metrics")


def document(snapshot: Snapshot) -> dict[str, Any]:
    state = LiveState(lambda: snapshot, lambda _: HEALTH, PAGE, "node-7", ("empty_cache",))
    return dict(json.loads(json.dumps(state.document(None, whole_processes=False), allow_nan=False)))


def rows(snapshot: Snapshot) -> list[dict[str, Any]]:
    return [dict(zip(COLUMNS, row, strict=True)) for row in document(snapshot)["processes"]]


def test_a_silent_process_has_one_row_without_values() -> None:
    silent = SilentReporter(ProcessKey(1, 9), None, 1000, "train", "0", 42.0)
    (row,) = rows(Snapshot(0.0, None, (), (silent,)))
    assert (row["pid"], row["state"], row["last_report_unix_seconds"]) == ("9@1", "silent", 42.0)
    assert {row[name] for name in ("gpu", "uuid", "used_bytes", "allocated_bytes")} == {None}


def test_a_process_clears_if_its_reporter_supports_it() -> None:
    able = reporting(7, devices=(sample(A),), actions=("empty_cache",))
    unable = reporting(8, devices=(sample(A),), actions=("reset_peak",))
    older = reporting(9, devices=(sample(A),))
    found = {row["pid"]: row["clears"] for row in rows(Snapshot(0.0, node(device(A)), (able, unable, older)))}
    assert found == {7: True, 8: False, 9: True}


def test_only_failed_checks_are_listed() -> None:
    made = document(Snapshot(0.0, node(device(A))))
    assert made["failed_checks"] == [{"part": "events", "status": "degraded", "detail": "the disk is full"}]
    assert (made["host"], made["status"], made["source"], made["page"], made["allowed_actions"]) == (
        "node-7",
        "degraded",
        "demo",
        PAGE.digest,
        ["empty_cache"],
    )
