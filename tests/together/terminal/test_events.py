"""`events` against a real exporter: filters, and `--follow` over a restart."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.builders import UUIDS, report, sample
from tests.support.exporter_process import ExporterProcess
from tests.support.running_command import clean_environment, run_command
from tests.support.waiting import patient, wait_for


@pytest.fixture
def exporter(tmp_path: Path) -> Iterator[ExporterProcess]:
    running = ExporterProcess(tmp_path, "--report.expiry", "3600", environment=clean_environment(), ready="/-/healthy")
    yield running
    running.close()


def run(exporter: ExporterProcess, pid: int, workload: str) -> None:
    """Let a process report once and end."""
    who: dict[str, Any] = {"workload": workload, "session": f"session-{workload}-{pid}"}
    exporter.report(report(pid, devices=(sample(UUIDS[0]),), **who))
    exporter.report(report(pid, sequence=2, final=True, **who))


def shown(exporter: ExporterProcess, *words: str) -> list[list[str]]:
    ended = run_command("events", *words, GPUMEM_EXPORTER_URL=exporter.url)
    assert (ended.returncode, ended.stderr) == (0, "")
    return [line.split() for line in ended.stdout.splitlines()]


def _local(form: str, unix_seconds: float) -> str:
    return time.strftime(form, time.localtime(unix_seconds))


def test_short_jobs_are_one_line_and_filters_narrow_each_other(exporter: ExporterProcess) -> None:
    for number in range(3):
        run(exporter, 700 + number, "eval")
    run(exporter, 800, "train")
    wait_for(lambda: len(exporter.events(type="process_ended")) == 4, "the ends")
    lines = shown(exporter)
    assert [line[1:3] for line in lines] == [["ran", "eval:"], ["ran", "train"]]
    assert lines[0][3] == "3"
    assert shown(exporter, "--job", "train") == lines[1:]
    assert shown(exporter, "--job", "train", "--since", "1h", "--type", "process_started,process_ended") == lines[1:]
    assert [line[1] for line in shown(exporter, "--type", "process_started", "--job", "train")] == ["started"]
    now = time.time()
    for since in ("1.5h", _local("%Y-%m-%d %H:%M:%S", now - 120), _local("%Y-%m-%d", now)):
        assert shown(exporter, "--since", since) == lines
    assert shown(exporter, "--since", _local("%Y-%m-%d %H:%M", now + 3600)) == []
    assert shown(exporter, "--type", "oom") == shown(exporter, "--job", "nothing") == []
    document = json.loads(run_command("events", "--json", GPUMEM_EXPORTER_URL=exporter.url).stdout)
    assert [event["folded"]["ends"] for event in document["events"]] == [3, 1]


def test_follow_survives_a_restart_and_ends_with_ctrl_c(exporter: ExporterProcess, tmp_path: Path) -> None:
    run(exporter, 700, "before")
    wait_for(lambda: exporter.events(type="process_ended"), "the end")
    out, errors = tmp_path / "out", tmp_path / "errors"
    with out.open("w") as stdout, errors.open("w") as stderr:
        following = subprocess.Popen(
            [sys.executable, "-m", "gpumem_exporter", "events", "--follow"],
            stdout=stdout,
            stderr=stderr,
            env=clean_environment(GPUMEM_EXPORTER_URL=exporter.url),
            # A shell without job control lets its background programs, and so the tests, ignore Ctrl-C.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )
    try:
        wait_for(lambda: "before" in out.read_text(), "the first line")
        exporter.stop()
        wait_for(errors.read_text, "the line about the restart")
        exporter.start()
        run(exporter, 701, "after")
        wait_for(lambda: "after" in out.read_text(), "the line after the restart")
        following.send_signal(signal.SIGINT)
        assert following.wait(patient(10.0)) == 0
    finally:
        following.kill()
        following.wait()
    assert [line.split()[2] for line in out.read_text().splitlines()] == ["before", "after"]
    assert errors.read_text().count("\n") == 1
    assert "waiting for the exporter" in errors.read_text()
