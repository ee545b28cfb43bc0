"""The commands against a real exporter in its own process, which serves the demo."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter import __version__
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.core.ledger import CATEGORIES
from tests.support.exporter_process import ExporterProcess
from tests.support.running_command import clean_environment, run_command
from tests.support.terminal_program import TerminalProgram
from tests.support.waiting import patient, wait_for

_TOKEN = "a-token-for-tests"


@dataclass(frozen=True)
class _Node:
    """A running exporter, and its commands."""

    socket: Path
    token_file: Path

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    def command(
        self, *arguments: str, url: str | None = None, token: bool = True, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        token_file = {"GPUMEM_ACTION_TOKEN_FILE": str(self.token_file)} if token else {}
        return run_command(*arguments, GPUMEM_EXPORTER_URL=url or self.url, **token_file, **environ)

    def json(self, *arguments: str) -> dict[str, Any]:
        ended = self.command(*arguments, "--json")
        assert ended.returncode == 0, ended.stderr
        document = json.loads(ended.stdout)
        assert isinstance(document, dict)
        return document


@contextlib.contextmanager
def _demo(directory: Path) -> Iterator[_Node]:
    token_file = directory / "token"
    token_file.touch(0o600)
    token_file.write_text(f"{_TOKEN}\n")
    flags = ("--demo", "--action.token-file", str(token_file))
    exporter = ExporterProcess(directory, *flags, environment=clean_environment())
    try:
        wait_for(lambda: len(exporter.processes()) >= 12, "a dozen reporting processes")
        yield _Node(exporter.socket, token_file)
        assert exporter.stop() == 0, exporter.log()
    finally:
        exporter.close()


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Node]:
    with _demo(tmp_path_factory.mktemp("cli")) as running:
        yield running


@pytest.fixture(scope="module")
def cleared_node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Node]:
    """A demo that a test may clear: the notebook of a demo does not fill its cache again for minutes."""
    with _demo(tmp_path_factory.mktemp("cleared")) as running:
        yield running


def test_info_shows_every_device_and_process_and_a_full_ledger(node: _Node) -> None:
    document = node.json("info")
    assert (document["source"], document["nvml"]["up"], len(document["devices"])) == ("demo", True, 8)
    for device in document["devices"]:
        # The non-torch memory of a new process is unknown until a reading and a report belong together.
        assert {*device["ledger"], "non_torch"} == set(CATEGORIES)
        assert sum(device["ledger"].values()) == device["memory"]["total_bytes"]
    ended = node.command("info")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "DEMO" in ended.stdout.splitlines()[0]
    for device in document["devices"]:
        assert device["name"].removeprefix("NVIDIA ") in ended.stdout
    for job in document["jobs"]:
        assert job["name"] in ended.stdout
    assert ended.stdout.splitlines()[-1].startswith("You can")
    wide = node.command("info", "-o", "wide", "--sort", "owner").stdout
    for process in document["processes"]:
        assert process["command"] in wide


@pytest.mark.parametrize(("environ", "colored"), [({}, True), ({"NO_COLOR": "1"}, False)])
def test_a_terminal_gets_its_width_and_colors_unless_no_color_is_set(
    node: _Node, environ: dict[str, str], colored: bool
) -> None:
    known = clean_environment(GPUMEM_EXPORTER_URL=node.url, TERM="xterm-256color", **environ)
    terminal = TerminalProgram([sys.executable, "-m", "gpumem_exporter", "info"], known, columns=80, lines=200)
    try:
        assert terminal.wait() == 0
        assert bool(re.search(rb"\x1b\[[0-9;]*3[0-9]m", terminal.output)) is colored
        assert any(line.startswith("Ledger") for line in terminal.lines)
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("answer", "kinds"),
    [("n", set()), ("y", {("now", False), ("step", False), ("step", True)}), ("now", {("now", False)})],
)
def test_a_clear_of_all_on_a_terminal_asks_and_lets_training_jobs_end_their_step(
    cleared_node: _Node, answer: str, kinds: set[tuple[str, bool]]
) -> None:
    known = clean_environment(
        GPUMEM_EXPORTER_URL=cleared_node.url,
        GPUMEM_ACTION_TOKEN_FILE=str(cleared_node.token_file),
        TERM="xterm-256color",
    )
    command = [
        sys.executable,
        "-m",
        "gpumem_exporter",
        "clear",
        "--all",
        "--settle",
        "0",
        "--reason",
        f"asked {answer}",
    ]
    terminal = TerminalProgram(command, known, columns=300, lines=200)
    try:
        terminal.until_shows("end of a step", "demo-llm-pretrain (4 ranks)", "[y/N/now]")
        terminal.type(answer + "\n")
        code = terminal.wait()
    finally:
        terminal.close()
    with ExporterApi((cleared_node.url,), token=_TOKEN) as api:
        actions = [
            it
            for it in api.get("/api/v1/actions")["actions"]
            if it["reason"] == f"asked {answer}" and not it["dry_run"]
        ]
        results = [row for action in actions for row in api.get(f"/api/v1/actions/{action['id']}")["results"]]
    assert {(action["mode"], action["group"]) for action in actions} == kinds
    assert kinds or code == 1
    acted = [result["pid"] for result in results if result["gpu"] == "0"]
    assert len(acted) == len(set(acted))


def test_a_reader_that_exits_early_causes_no_traceback(node: _Node) -> None:
    shell = f"{sys.executable} -m gpumem_exporter info --json | head -1"
    ended = subprocess.run(
        ["sh", "-c", shell],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
        env=clean_environment(GPUMEM_EXPORTER_URL=node.url),
    )
    assert (ended.stdout, ended.stderr) == ("{\n", "")


def test_a_dry_run_changes_nothing_and_a_clear_frees_what_it_reports(node: _Node) -> None:
    target = ("--workload", "demo-notebook")
    before = node.json("clear", *target, "--dry-run")
    assert before["state"] == "done"
    (would,) = before["results"]
    assert would["freed_bytes"] > 1 << 30
    cleared = node.json("clear", *target, "--reason", "a test")
    (result,) = cleared["results"]
    assert result["outcome"] == "done"
    assert result["freed_bytes"] == result["reserved_before_bytes"] - result["reserved_after_bytes"]
    assert result["freed_bytes"] >= would["freed_bytes"]
    assert (cleared["freed_bytes"], cleared["reason"]) == (result["freed_bytes"], "a test")


def test_a_refused_action_exits_with_1_and_names_the_option(node: _Node) -> None:
    ended = node.command("clear", "--all", token=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert "--action.token-file" in ended.stderr
    assert _TOKEN not in ended.stderr


_OF_THE_NODE = ("driver", "devices", "jobs")
"""What depends on this machine and on what the demo's jobs do at the moment."""


def test_doctor_passes_a_healthy_demo(node: _Node) -> None:
    document = node.json("doctor")
    findings = {finding["check"]: finding for finding in document["findings"]}
    assert {check: finding["verdict"] for check, finding in findings.items() if check not in _OF_THE_NODE} == {
        "exporter": "PASS",
        "socket": "PASS",
        "trust": "PASS",
        "version": "PASS",
        "health": "PASS",
        "auth": "PASS",
        "actions": "PASS",
        "clock": "PASS",
        "reporters": "PASS",
        "pid namespace": "PASS",
    }
    assert __version__ in findings["version"]["detail"]
    assert str(node.socket) in findings["socket"]["detail"]
    assert "demo" in findings["health"]["detail"]


def test_doctor_without_an_exporter_fails_with_1_and_the_fix(node: _Node) -> None:
    ended = node.command("doctor", url="unix:///nonexistent.sock")
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = ended.stdout.splitlines()
    failed = {line.split()[1] for line in lines if line.startswith("FAIL")}
    assert {"exporter", "socket"} <= failed
    assert any("gpumem-exporter serve" in line for line in lines)
    assert any("--web.listen-socket /nonexistent.sock" in line for line in lines)
