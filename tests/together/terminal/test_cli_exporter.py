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
from tests.support.exporter_process import ExporterProcess, token_file
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
    token = token_file(directory, _TOKEN)
    flags = ("--demo", "--action.token-file", token)
    exporter = ExporterProcess(directory, *flags, environment=clean_environment())
    try:
        wait_for(lambda: len(exporter.processes()) >= 12, "a dozen reporting processes")
        yield _Node(exporter.socket, Path(token))
        assert exporter.stop() == 0, exporter.log()
    finally:
        exporter.close()


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


def test_doctor_passes_a_healthy_demo(node: _Node) -> None:
    findings = {finding["check"]: finding for finding in node.json("doctor")["findings"]}
    of_the_node = ("driver", "devices", "jobs")  # which depend on this machine and on the demo's jobs at the moment
    assert {check for check, finding in findings.items() if finding["verdict"] != "PASS"} <= set(of_the_node)
    assert findings.keys() >= {"exporter", "socket", "trust", "version", "health", "auth", "actions", "reporters"}
    assert __version__ in findings["version"]["detail"]
    assert str(node.socket) in findings["socket"]["detail"]
