"""Commands against a real exporter in its own process: of the demo, and `events` over a restart."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter import __version__
from gpumem_exporter.cli.api_client import ExporterApi
from tests.support.builders.builders import UUIDS, report, sample
from tests.support.processes.running_command import clean_environment, run_command
from tests.support.processes.terminal_program import TerminalProgram
from tests.support.servers.exporter_process import ExporterProcess, token_file
from tests.support.waiting import patient, wait_for

_TOKEN = "a-token-for-tests"


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The variables of a command for an exporter of the demo."""
    directory = tmp_path_factory.mktemp("cli")
    token = token_file(directory, _TOKEN)
    flags = ("--demo", "--action.token-file", token)
    exporter = ExporterProcess(directory, *flags, environment=clean_environment())
    try:
        wait_for(lambda: len(exporter.processes()) >= 12, "a dozen reporting processes")
        yield {"GPUMEM_EXPORTER_URL": exporter.url, "GPUMEM_ACTION_TOKEN_FILE": token}
        assert exporter.stop() == 0, exporter.log()
    finally:
        exporter.close()


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_its_width_and_colors_unless_no_color_is_set(
    node: dict[str, str], environ: dict[str, str], colored: bool
) -> None:
    known = clean_environment(**node, TERM="xterm-256color", **environ)
    terminal = TerminalProgram([sys.executable, "-m", "gpumem_exporter", "info"], known, columns=80, lines=200)
    try:
        assert terminal.wait() == 0
        assert bool(re.search(rb"\x1b\[[0-9;]*3[0-9]m", terminal.output)) is colored
        assert any(line.startswith("Ledger") for line in terminal.lines)
    finally:
        terminal.close()


def test_a_clear_of_all_on_a_terminal_asks_and_lets_training_jobs_end_their_step(node: dict[str, str]) -> None:
    known = clean_environment(**node, TERM="xterm-256color")
    command = [sys.executable, "-m", "gpumem_exporter", "clear", "--all", "--settle", "0"]
    terminal = TerminalProgram(command, known, columns=300, lines=200)
    try:
        terminal.until_shows("end of a step", "demo-llm-pretrain (4 ranks)", "[y/N]")
        terminal.type("y\n")
        assert terminal.wait() in (0, 1)
    finally:
        terminal.close()
    with ExporterApi((node["GPUMEM_EXPORTER_URL"],), token=_TOKEN) as api:
        (action,) = [each for each in api.get("/api/v1/actions")["actions"] if not each["dry_run"]]
        results = api.get(f"/api/v1/actions/{action['id']}")["results"]
    kinds = {(result["mode"], result["at_step"] is not None) for result in results}
    assert kinds == {("now", False), ("step", False), ("step", True)}
    acted = [(result["pid"], result["gpu"]) for result in results]
    assert len(acted) == len(set(acted))
    (cleared, *_) = [row for row in results if row["workload"] == "demo-notebook"]
    assert cleared["outcome"] == "done"
    assert cleared["freed_bytes"] == cleared["reserved_before_bytes"] - cleared["reserved_after_bytes"] > 1 << 30


def test_doctor_passes_a_healthy_demo(node: dict[str, str]) -> None:
    ended = run_command("doctor", "--json", **node)
    findings = {finding["check"]: finding for finding in json.loads(ended.stdout)["findings"]}
    of_the_node = ("driver", "devices", "jobs")  # which depend on this machine and on the demo's jobs at the moment
    assert {check for check, finding in findings.items() if finding["verdict"] != "PASS"} <= set(of_the_node)
    assert findings.keys() >= {"exporter", "socket", "trust", "version", "health", "auth", "actions", "reporters"}
    assert __version__ in findings["version"]["detail"]
    assert node["GPUMEM_EXPORTER_URL"].removeprefix("unix://") in findings["socket"]["detail"]


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
    local = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now - 120))
    for since in ("1.5h", local, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(now - 120))):
        assert shown(exporter, "--since", since) == lines
    assert shown(exporter, "--since", time.strftime("%Y-%m-%d %H:%M", time.localtime(now + 3600))) == []
    assert shown(exporter, "--type", "oom") == shown(exporter, "--job", "nothing") == []


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
