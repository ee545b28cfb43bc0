"""Completion in real shells against a real exporter."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, to_wire
from gpumem_exporter.cli.completion import of_list
from tests.support.builders import UUIDS, report, sample
from tests.support.exporter_process import ExporterProcess
from tests.support.running_command import CONSOLE_SCRIPT, clean_environment, run_command
from tests.support.terminal_program import TerminalProgram
from tests.support.waiting import patient


@pytest.fixture(scope="module")
def exporter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    folder = tmp_path_factory.mktemp("completion")
    running = ExporterProcess(folder, "--report.expiry", "3600", environment=clean_environment(), ready="/-/healthy")
    connection = Connection(running.url, timeout_seconds=patient(10.0))
    for pid, workload in enumerate(("llm-pretrain", "notebook", "eval:all", "t$(touch x)"), 4711):
        sent = report(pid, workload=workload, session=workload, devices=(sample(UUIDS[0]),))
        body = json.dumps(to_wire(sent)).encode()
        answer = connection.request("POST", REPORTS_PATH, body, {"Content-Type": "application/json"})
        assert answer.status == 200, answer.body
    connection.close()
    yield running
    running.close()


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the completion of bash and zsh, and the program."""
    home = tmp_path_factory.mktemp("home")
    program = home / "gpumem-exporter"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(CONSOLE_SCRIPT)} "$@"\n')
    program.chmod(0o755)
    for words in (("--install-completion",), ("--install-completion", "zsh")):
        ended = run_command(*words, HOME=str(home), SHELL="/bin/bash", XDG_DATA_HOME="")
        assert (ended.returncode, ended.stderr) == (0, "")
    return home


def in_bash(home: Path, line: str, url: str) -> list[str]:
    """Return the completions of the last word of a line in bash, and assert that nothing else is printed."""
    script = f"""
        source {home}/.local/share/bash-completion/completions/gpumem-exporter
        COMP_LINE={shlex.quote(line)} COMP_POINT={len(line)}
        _gpumem_exporter_completion gpumem-exporter
        printf '%s\\n' "${{COMPREPLY[@]}}"
    """
    environ = clean_environment(GPUMEM_EXPORTER_URL=url, PATH=f"{home}:{os.environ['PATH']}")
    bash = shutil.which("bash")
    assert bash
    ended = subprocess.run(
        [bash, "--norc", "-c", script], capture_output=True, text=True, timeout=patient(30), check=False, env=environ
    )
    assert ended.stderr == ""
    return ended.stdout.split()


def test_a_list_completes_its_last_name_and_repeats_none() -> None:
    assert [item.value for item in of_list(["0", "1", "10"], "0,1")] == ["0,1", "0,10"]
    assert [item.value for item in of_list(["0", "1"], "0,")] == ["0,1"]


@pytest.mark.parametrize("url", ["unix:///nonexistent.sock", "no url"])
def test_without_an_exporter_names_have_no_completion_and_no_error(home: Path, url: str) -> None:
    assert in_bash(home, "gpumem-exporter clear --pid ", url) == []
    assert in_bash(home, "gpumem-exporter clear --work", url) == ["--workload"]


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_tab_completes_names_with_colons_and_quotes_others(
    exporter: ExporterProcess, home: Path, shell: str, tmp_path: Path
) -> None:
    """A person types in the shell, whose files have what `--install-completion` has said."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    (pid,) = in_bash(home, "gpumem-exporter info --pid 4711", exporter.url)
    prompt = "PS1='ready> '\n"
    (home / ".bashrc").write_text(f"{prompt}source ~/.local/share/bash-completion/completions/gpumem-exporter\n")
    (home / ".zshrc").write_text(f"{prompt}fpath+=~/.zfunc; autoload -Uz compinit; compinit\n")
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
            ("info --pid 4711@", f"--pid {pid}"),
            (f"info --pid {pid[:-1]}", f"--pid {pid}"),
            ("clear --workload eval:a", "--workload eval:all"),
            ("clear --workload notebook,eval:a", "--workload notebook,eval:all"),
            ("clear --workload t", r"--workload t\$\(touch\ x\)"),
        ):
            program.type(f"gpumem-exporter {typed}\t")
            program.until_shows(f"gpumem-exporter {typed.partition(' ')[0]} {completed}")
            program.type("\x15")
            program.until(lambda: "gpumem-exporter" not in program.lines[program.screen.cursor.y], "an empty line")
    finally:
        program.close()
