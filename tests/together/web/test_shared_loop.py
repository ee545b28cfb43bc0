"""Replies about a whole node: they are built beside the event loop, and their size has a limit."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import Target
from gpumem_exporter.core.event import Event
from tests.support.builders import UUIDS, report, sample
from tests.support.running_exporter import RunningExporter, running_exporter
from tests.support.waiting import patient


@pytest.fixture(scope="module")
def exporter() -> Iterator[RunningExporter]:
    with running_exporter(report_expiry=3600.0) as running:
        running.report(report(1, devices=(sample(),), start_time_ticks=1000))
        yield running


def test_large_replies_are_built_beside_the_event_loop(exporter: RunningExporter) -> None:
    paths = ["devices", "processes", "live", "actions", "events"]
    entered, release = threading.Event(), threading.Event()

    def occupy() -> bytes:
        entered.set()
        release.wait(patient(30))
        return b""

    asyncio.run_coroutine_threadsafe(exporter.runtime.renderer.render(occupy), exporter.loop)
    with ThreadPoolExecutor() as pool:
        try:
            assert entered.wait(patient(30))
            waiting = [pool.submit(exporter.get, f"/api/v1/{path}") for path in paths]
            for _ in range(20):
                assert exporter.get("/-/healthy").status == 200
            clear = {"action": "empty_cache", "target": {"pid": "1"}, "dry_run": True}
            assert exporter.act(**clear).status == 200, "an action of few processes does not wait"
            assert not any(future.done() for future in waiting)
        finally:
            release.set()
        assert {future.result(patient(30)).status for future in waiting} == {200}


def test_the_list_of_actions_has_no_results_and_a_limited_size(exporter: RunningExporter) -> None:
    row = ActionResult(1, "w", "", "0", UUIDS[0], "failed", "x" * 500)
    names = [f"{number:0100d}" for number in range(140)]

    async def finish() -> None:
        for number in range(300):
            exporter.runtime.dispatcher.restore(
                Action(
                    *(f"id-{number}", "reset_peak", "failed", "root", float(number), Target(workload=names)),
                    results=(row,) * 10,
                    caller="uid:0",
                ),
                None,
            )

    asyncio.run_coroutine_threadsafe(finish(), exporter.loop).result(patient(30))
    answer = exporter.get("/api/v1/actions?limit=1000")
    listed = json.loads(answer.body)["actions"]
    assert len(answer.body) < 1.1 * (1 << 20)
    assert 10 < len(listed) < 300
    old = next(action for action in listed if action["id"].startswith("id-"))
    assert old["outcomes"] == {"failed": 10}
    assert "results" not in old
    assert len(exporter.document(f"/api/v1/actions/{old['id']}")["results"]) == 10


def test_the_memory_of_a_job_is_read_without_the_events_of_other_jobs(exporter: RunningExporter) -> None:
    def ended(number: int, job_id: str) -> Event:
        devices = [{"gpu": "0", "uuid": f"GPU-{number}-{index}", "used_peak_bytes": index} for index in range(20)]
        detail = {"slurm_job_id": job_id, "ray_job_id": None, "first_report_unix_seconds": 1.0, "devices": devices}
        return Event("process_ended", time.time(), pid=number, workload="w", rank="", detail=detail)

    for batch in range(20):
        events = [ended(100 * batch + number, "other") for number in range(100)]
        committed = [exporter.runtime.node.journal.put(event) for event in events]
        assert all(future.result(patient(30)) for future in committed)
    assert exporter.runtime.node.journal.put(ended(9000, "4711")).result(patient(30))

    def read(_: int) -> list[int]:
        return [process["pid"] for process in exporter.document("/api/v1/jobs/4711")["processes"]]

    with ThreadPoolExecutor(8) as pool:
        tracemalloc.start()
        try:
            assert list(pool.map(read, range(8))) == [[9000]] * 8
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak < 4 << 20
    assert not exporter.document("/api/v1/jobs/4711")["more"]
    everything = exporter.document("/api/v1/jobs/other")
    assert exporter.request("GET", "/api/v1/jobs/other?uid=7").status == 404
    assert len(everything["processes"]) > 1000
