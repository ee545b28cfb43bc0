"""`GET /api/v1/live` on the real server."""

from __future__ import annotations

import pytest

from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.running_exporter import RunningExporter, problem, running_exporter
from tests.support.waiting import eventually

LIVE = "/api/v1/live"


def test_the_state_has_the_last_report_and_the_history_the_last_point(exporter: RunningExporter) -> None:
    exporter.report(report(4711, devices=(sample(UUIDS[0], 30 * MIB, 20 * MIB),)))
    live = eventually(
        lambda: exporter.document(LIVE), lambda live: live["state"]["processes"] and live["history"]["seconds"]
    )
    (row,) = [dict(zip(live["state"]["columns"], row, strict=True)) for row in live["state"]["processes"]]
    assert (row["pid"], row["allocated_bytes"], row["reclaimable_bytes"]) == (4711, 30 * MIB, 20 * MIB)
    assert [device["uuid"] for device in live["state"]["devices"]] == list(UUIDS[:2])
    line = live["history"]["devices"][UUIDS[1]]
    assert (set(line["in_use"]), set(line["allocated"])) == ({400}, {0})


@pytest.mark.parametrize("path", [LIVE, f"{LIVE}?processes=documents"])
def test_an_unchanged_state_is_not_sent_again(path: str) -> None:
    with running_exporter(collect_interval=600.0) as exporter:
        etag = eventually(lambda: exporter.get(path).headers["etag"], lambda etag: "None" not in etag)
        again = exporter.get(path, If_None_Match=etag)
        assert (again.status, again.body) == (304, b"")
        exporter.report(report(4711))
        changed = eventually(lambda: exporter.get(path, If_None_Match=etag), lambda reply: reply.status == 200)
        assert changed.headers["etag"] != etag


def test_a_command_gets_a_state_without_delay(exporter: RunningExporter) -> None:
    for pid in range(1, 20):
        exporter.report(report(pid))
        processes = exporter.document(f"{LIVE}?processes=documents")["state"]["processes"]
        assert pid in [process["pid"] for process in processes]


def test_only_newer_points_of_the_history_are_sent(exporter: RunningExporter) -> None:
    known = eventually(lambda: exporter.document(LIVE)["history"], lambda history: len(history["seconds"]) > 1)
    since = exporter.document(f"{LIVE}?since={known['seconds'][0]}")["history"]
    assert since["seconds"][0] == known["seconds"][1]
    nothing = exporter.document(f"{LIVE}?since=1e12")["history"]
    assert (nothing["seconds"], nothing["devices"], nothing["span_seconds"]) == ([], {}, 600.0)


@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}])
def test_another_sites_page_is_refused(exporter: RunningExporter, headers: dict[str, str]) -> None:
    problem(exporter.get(LIVE, **headers), 403)
