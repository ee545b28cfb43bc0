"""`GET /api/v1/live` on the real server."""

from __future__ import annotations

import json

import pytest

from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.running_exporter import RunningExporter, problem, running_exporter
from tests.support.waiting import eventually

LIVE = "/api/v1/live"


def test_only_the_requested_job_has_details(exporter: RunningExporter) -> None:
    for pid in (1, 2):
        exporter.report(report(pid, devices=(sample(UUIDS[0], MIB),), workload=f"job {pid}"))
    first, second = sorted(exporter.document(f"{LIVE}?details=all")["jobs"], key=lambda job: str(job["name"]))[-2:]
    whole = set(first["processes"][0])
    shown = {job["id"]: job["processes"][0] for job in exporter.document(f"{LIVE}?details={first['id']}")["jobs"]}
    assert set(shown[first["id"]]) == whole
    assert set(shown[second["id"]]) < whole
    assert set(shown[second["id"]]["devices"][0]) < set(shown[first["id"]]["devices"][0])


def test_an_unchanged_document_is_not_sent_again() -> None:
    with running_exporter() as exporter:
        first = eventually(lambda: exporter.get(LIVE), lambda reply: b'"devices":[{' in reply.body)
        etag, taken = first.headers["etag"], json.loads(first.body)["node"]["taken_unix_seconds"]
        eventually(lambda: exporter.document(LIVE)["node"]["taken_unix_seconds"], lambda later: later > taken)
        again = exporter.get(LIVE, If_None_Match=etag)
        assert (again.status, again.body) == (304, b"")
        exporter.report(report(4711))
        changed = eventually(lambda: exporter.get(LIVE, If_None_Match=etag), lambda reply: reply.status == 200)
        assert changed.headers["etag"] != etag


@pytest.mark.parametrize("path", [LIVE, "/api/v1/history"])
@pytest.mark.parametrize("headers", [{"Origin": "http://evil.example"}, {"Sec_Fetch_Site": "cross-site"}])
def test_another_sites_page_is_refused(exporter: RunningExporter, path: str, headers: dict[str, str]) -> None:
    problem(exporter.get(path, **headers), 403)
