"""Completion in real shells against a real exporter."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.builders.builders import UUIDS, report, sample
from tests.support.processes.running_command import CONSOLE_SCRIPT, clean_environment, run_command
from tests.support.processes.terminal_program import TerminalProgram
from tests.support.servers.exporter_process import ExporterProcess


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    folder = tmp_path_factory.mktemp("completion")
    running = ExporterProcess(folder, "--report.expiry", "3600", environment=clean_environment(), ready="/-/healthy")
    for pid, workload in enumerate(("llm-pretrain", "notebook", "eval:all", "t$(touch x)"), 4711):
        running.report(report(pid, workload=workload, session=workload, devices=(sample(UUIDS[0]),)))
    yield running
    running.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the program, and with shells that complete it."""
    home = tmp_path_factory.mktemp("home")
    program = home / "gpumem-exporter"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(CONSOLE_SCRIPT)} "$@"\n')
    program.chmod(0o755)
    source = 'eval "$(_GPUMEM_EXPORTER_COMPLETE={}_source gpumem-exporter)"'
    (home / ".bashrc").write_text(f"PS1='ready> '\n{source.format('bash')}\n")
    (home / ".zshrc").write_text(f"PS1='ready> '\nautoload -Uz compinit; compinit\n{source.format('zsh')}\n")
    return home


def completions(line: str, url: str, shell: str = "bash") -> list[str]:
    """Return what the program prints at a tab after a line, and assert that nothing else is printed."""
    words = line.split(" ")
    ended = run_command(
        _GPUMEM_EXPORTER_COMPLETE=f"{shell}_complete",
        COMP_WORDS=line,
        COMP_CWORD=words[-1] if shell == "fish" else str(len(words) - 1),
        GPUMEM_EXPORTER_URL=url,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    return ended.stdout.split()


@pytest.mark.parametrize("url", ["unix:///nonexistent.sock", "no url"])
def test_without_an_exporter_names_have_no_completion_and_no_error(url: str) -> None:
    assert completions("gpumem-exporter clear --pid ", url) == []
    assert completions("gpumem-exporter clear --work", url) == ["plain,--workload"]


def test_names_that_a_shell_would_run_and_names_behind_kubectl_are_not_completed(exporter: ExporterProcess) -> None:
    workloads = completions("gpumem-exporter clear --workload ", exporter.url)
    assert set(workloads) == {"plain,llm-pretrain", "plain,notebook", "plain,eval:all"}
    assert completions("gpumem-exporter --kube gpu-1 clear --workload ", exporter.url) == []
    assert "plain,notebook" in completions("gpumem-exporter clear --workload ", exporter.url, "fish")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_tab_completes_the_names_of_commands_options_and_jobs(
    exporter: ExporterProcess, home: Path, shell: str
) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    path = f"{home}:{os.environ['PATH']}"
    places = {"PATH": path, "HOME": str(home), "ZDOTDIR": str(home), "TERM": "xterm"}
    program = TerminalProgram([shell, "-i"], clean_environment(GPUMEM_EXPORTER_URL=exporter.url, **places), columns=160)
    try:
        program.until_shows("ready>")
        for typed, completed in (
            ("fleet cl", "clear"),
            ("events --job n", "--job notebook"),
            ("clear --workload ll", "--workload llm-pretrain"),
            ("clear --mo", "--mode"),
            ("clear --workload notebook,ll", "--workload notebook,llm-pretrain"),
        ):
            program.type(f"gpumem-exporter {typed}\t")
            program.until_shows(f"gpumem-exporter {typed.partition(' ')[0]} {completed}")
            program.type("\x15")
            program.until(lambda: "gpumem-exporter" not in program.lines[program.screen.cursor.y], "an empty line")
    finally:
        program.close()
