"""The commands against a real exporter in its own process, which serves the demo."""

from __future__ import annotations

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
from tests.support.waiting import wait_for

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


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Node]:
    directory = tmp_path_factory.mktemp("cli")
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
    assert [process["pid"] for process in document["processes"] if process["command"] not in wide] == []


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


def test_a_clear_of_all_on_a_terminal_asks_and_lets_training_jobs_end_their_step(node: _Node) -> None:
    known = clean_environment(
        GPUMEM_EXPORTER_URL=node.url, GPUMEM_ACTION_TOKEN_FILE=str(node.token_file), TERM="xterm-256color"
    )
    command = [sys.executable, "-m", "gpumem_exporter", "clear", "--all", "--settle", "0"]
    terminal = TerminalProgram(command, known, columns=300, lines=200)
    try:
        terminal.until_shows("end of a step", "demo-llm-pretrain (4 ranks)", "[y/N]")
        terminal.type("y\n")
        assert terminal.wait() in (0, 1)
    finally:
        terminal.close()
    with ExporterApi((node.url,), token=_TOKEN) as api:
        (action,) = [each for each in api.get("/api/v1/actions")["actions"] if not each["dry_run"]]
        results = api.get(f"/api/v1/actions/{action['id']}")["results"]
    kinds = {(result["mode"], result["at_step"] is not None) for result in results}
    assert kinds == {("now", False), ("step", False), ("step", True)}
    acted = [(result["pid"], result["gpu"]) for result in results]
    assert len(acted) == len(set(acted))
    (cleared, *_) = [row for row in results if row["workload"] == "demo-notebook"]
    assert cleared["outcome"] == "done"
    assert cleared["freed_bytes"] == cleared["reserved_before_bytes"] - cleared["reserved_after_bytes"] > 1 << 30


def test_a_refused_action_exits_with_1_and_names_the_option(node: _Node) -> None:
    ended = node.command("clear", "--all", token=False)
    assert (ended.returncode, ended.stdout, ended.stderr.count("\n")) == (1, "", 1)
    assert "--action.token-file" in ended.stderr
    assert _TOKEN not in ended.stderr


def test_doctor_passes_a_healthy_demo(node: _Node) -> None:
    findings = {finding["check"]: finding for finding in node.json("doctor")["findings"]}
    of_the_node = ("driver", "devices", "jobs")  # which depend on this machine and on the demo's jobs at the moment
    assert {check for check, finding in findings.items() if finding["verdict"] != "PASS"} <= set(of_the_node)
    assert findings.keys() >= {"exporter", "socket", "trust", "version", "health", "auth", "actions", "reporters"}
    assert __version__ in findings["version"]["detail"]
    assert str(node.socket) in findings["socket"]["detail"]


def test_doctor_without_an_exporter_fails_with_1_and_the_fix(node: _Node) -> None:
    ended = node.command("doctor", url="unix:///nonexistent.sock")
    assert (ended.returncode, ended.stderr) == (1, "")
    lines = ended.stdout.splitlines()
    assert {line.split()[1] for line in lines if line.startswith("FAIL")} >= {"exporter", "socket"}
    assert any("--web.listen-socket /nonexistent.sock" in line for line in lines)
