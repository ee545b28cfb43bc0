"""`GET /api/v1/history` on the real server, and over a restart of the real process."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.core.samples import ProcessMemory
from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.exporter_process import QUICK, ExporterProcess, token_file
from tests.support.running_exporter import RunningExporter, ScriptedProvider, problem, running_exporter
from tests.support.waiting import eventually

HISTORY = "/api/v1/history"


def known(document: Any, name: str = "used") -> bool:
    """Return whether a value of the first series is known."""
    return any(value is not None for series in document["series"][:1] for value in series[name]["max"])


def test_devices_are_shown_without_parameters_and_jobs_by_their_id(exporter: RunningExporter) -> None:
    exporter.report(report(4711, devices=(sample(UUIDS[0], 30 * MIB),)))
    document = eventually(lambda: exporter.document(HISTORY), known)
    assert [(series["device"], series["job"], series["gpu"]) for series in document["series"]] == [
        (UUIDS[0], None, "0"),
        (UUIDS[1], None, "1"),
    ]
    assert document["step_seconds"] == 1
    assert {400 * MIB, None} >= set(document["series"][0]["used"]["max"])
    (job,) = exporter.document("/api/v1/live")["jobs"]
    path = f"{HISTORY}?job={job['id']}"
    of_job = eventually(lambda: exporter.document(path), lambda found: known(found, "allocated"))
    (series,) = of_job["series"]
    assert (series["device"], series["job"], series["name"]) == (None, job["id"], job["name"])
    assert 30 * MIB in series["allocated"]["max"]
    both = exporter.document(f"{HISTORY}?job={job['id']}&device={UUIDS[1]}&points=60")
    assert [series["device"] for series in both["series"]] == [UUIDS[1], None]
    assert both["step_seconds"] == 10
    assert exporter.document(f"{HISTORY}?job=unknown~1")["series"] == []


@pytest.mark.parametrize(
    "query",
    [
        *("points=2001", "points=x", "from=-1", "from=nan", "from=1e300", "to=1e12", "from=20&to=20"),
        *(f"device={97 * 'x'}", f"job={2049 * 'x'}", "jobs=x", "&".join(["device=GPU-1"] * 129)),
    ],
)
def test_invalid_parameters_are_a_problem(exporter: RunningExporter, query: str) -> None:
    errors = problem(exporter.get(f"{HISTORY}?{query}"), 422)["errors"]
    assert errors[0]["field"].partition(".")[0] in query


def test_hidden_commands_are_shown_with_the_token_only(tmp_path: Path) -> None:
    token = token_file(tmp_path, "a-long-token")
    provider = ScriptedProvider()
    provider.processes[UUIDS[0]] = (ProcessMemory(4711, 50 * MIB),)
    with running_exporter(provider=provider, web_hide_identities=True, action_token_file=token) as exporter:
        path = f"{HISTORY}?job=pid~4711"
        (hidden,) = eventually(lambda: exporter.document(path)["series"])
        assert hidden["name"] == "pid 4711"
        assert b"train.py" not in exporter.get(path).body
        assert b"train.py" in exporter.get(path, Authorization="Bearer a-long-token").body


def test_the_history_of_the_real_process_survives_a_restart(tmp_path: Path) -> None:
    folder, begun = tmp_path / "storage", int(time.time())
    exporter = ExporterProcess(tmp_path, "--demo", "--storage.path", str(folder), *QUICK)

    def shown() -> dict[int, int | None]:
        document = exporter.get(f"{HISTORY}?from={begun}")
        (series, *_) = document["series"] or [{"used": {"max": []}}]
        used = series["used"]["max"]
        return {unix: value for unix, value in zip(document["unix_seconds"], used, strict=False) if value is not None}

    try:
        before = eventually(shown, lambda values: len(values) > 2)
        assert exporter.stop() == 0
        assert [path.name for path in folder.glob("history*")] == ["history.db"]
        exporter.start()
        after = eventually(shown, lambda values: max(values, default=0) > max(before) and min(values) <= min(before))
        assert after.items() >= before.items()
        assert exporter.stop(signal.SIGKILL) != 0
        exporter.start()
        assert eventually(shown, lambda values: min(values, default=2**40) <= min(before)).items() >= before.items()
    finally:
        exporter.close()
