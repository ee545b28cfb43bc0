"""Replies about a whole node: built beside the event loop, limited in size, and their history over a restart."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from gpumem_exporter.actions.action import Action, ActionResult
from gpumem_exporter.actions.action_options import ActionRequest, Target
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.readings import ProcessMemory
from tests.conftest import StartExporter
from tests.support.builders.builders import MIB, UUIDS, report, sample
from tests.support.servers.exporter_process import QUICK, token_file
from tests.support.servers.running_exporter import RunningExporter, ScriptedProvider, problem, running_exporter
from tests.support.waiting import eventually, patient


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
    request = ActionRequest("reset_peak", Target(workload=[f"{number:0100d}" for number in range(140)]))

    async def finish() -> None:
        for number in range(300):
            exporter.runtime.dispatcher.actions.restore(
                Action(f"id-{number}", request, "failed", "root", float(number), results=(row,) * 10, caller="uid:0")
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
        committed = [exporter.runtime.journal.put(event) for event in events]
        assert all(future.result(patient(30)) for future in committed)
    assert exporter.runtime.journal.put(ended(9000, "4711")).result(patient(30))

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


HISTORY = "/api/v1/history"


@pytest.mark.parametrize(
    "query",
    [
        *("points=2001", "points=x", "from=-1", "from=nan", "from=1e300", "to=1e12", "from=20&to=20"),
        *("jobs=x", "&".join(["device=GPU-1"] * 129)),
    ],
)
def test_invalid_parameters_are_a_problem(exporter: RunningExporter, query: str) -> None:
    errors = problem(exporter.get(f"{HISTORY}?{query}"), 422)["errors"]
    assert errors[0]["field"].partition(".")[0] in query


def test_hidden_commands_and_slurm_jobs_are_shown_with_the_token_only(tmp_path: Path) -> None:
    token, authorized = token_file(tmp_path, "a-long-token"), {"Authorization": "Bearer a-long-token"}
    provider = ScriptedProvider()
    provider.processes[UUIDS[0]] = (ProcessMemory(4711, 50 * MIB),)
    with running_exporter(provider=provider, web_hide_identities=True, action_token_file=token) as exporter:
        path = f"{HISTORY}?job=pid~4711"
        (hidden,) = eventually(lambda: exporter.document(path)["series"])
        assert hidden["name"] == "pid 4711"
        assert b"train.py" not in exporter.get(path).body
        assert b"train.py" in exporter.get(path, **authorized).body
        exporter.report(report(7, devices=(sample(),), slurm_job_id="4712"))
        for path in ("/api/v1/live", "/api/v1/processes"):
            eventually(lambda path=path: b'"4712"' in exporter.get(path, **authorized).body)  # type: ignore[misc]
            assert b'"4712"' not in exporter.get(path).body


def test_the_history_of_the_real_process_survives_a_restart(start_exporter: StartExporter, tmp_path: Path) -> None:
    folder, begun = tmp_path / "storage", int(time.time())
    exporter = start_exporter(None, "--demo", "--storage.path", str(folder), *QUICK)

    def shown() -> dict[int, int | None]:
        document = exporter.get(f"{HISTORY}?from={begun}")
        (series, *_) = document["series"] or [{"used": {"max": []}}]
        used = series["used"]["max"]
        return {unix: value for unix, value in zip(document["unix_seconds"], used, strict=False) if value is not None}

    before = eventually(shown, lambda values: len(values) > 2)
    assert exporter.stop() == 0
    assert [path.name for path in folder.glob("history*")] == ["history.db"]
    exporter.start()
    after = eventually(shown, lambda values: max(values, default=0) > max(before) and min(values) <= min(before))
    assert after.items() >= before.items()
    assert exporter.stop(signal.SIGKILL) != 0
    exporter.start()
    assert eventually(shown, lambda values: min(values, default=2**40) <= min(before)).items() >= before.items()
