from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.running_command import CONSOLE_SCRIPT
from tests.support.waiting import patient

_BOOTSTRAP = str(REPOSITORY / "client" / "gpumem_client" / "bootstrap")
_TELL = "import json, os, sys; print(json.dumps([sys.argv[1:], sys.path, dict(os.environ), os.getpid()]))"


def _run(
    *arguments: str, environ: dict[str, str] | None = None, cwd: Path | None = None, python: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """`gpumem-exporter run` in its own process, as the console script starts it."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPUMEM_", "PYTHONPATH"))}
    return subprocess.run(
        [sys.executable, *python, "-c", CONSOLE_SCRIPT, "run", *arguments],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
        cwd=cwd,
        env={**clean, **(environ or {})},
    )


def test_the_command_gets_its_arguments_its_labels_and_the_bootstrap(tmp_path: Path) -> None:
    ended = _run("--workload", "llm", "--", sys.executable, "-c", _TELL, "--lr", "3e-4", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    arguments, path, environ, _ = json.loads(ended.stdout)
    assert arguments == ["--lr", "3e-4"]
    assert environ["GPUMEM_WORKLOAD"] == "llm"
    assert environ["GPUMEM_INJECT"] == "1"
    assert environ["PYTHONPATH"] == _BOOTSTRAP
    assert path.count(str(tmp_path)) == 0


@pytest.mark.parametrize("locale", [{}, {"LC_CTYPE": "POSIX"}, {"LC_CTYPE": "C.UTF-8"}, {"LC_ALL": "C"}])
def test_the_command_gets_the_original_locale(locale: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", CONSOLE_SCRIPT, "run", "--", "/usr/bin/env"],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=True,
        env=locale,
    )
    variables = dict(line.split("=", 1) for line in ended.stdout.splitlines())
    assert {name: value for name, value in variables.items() if name.startswith("LC_")} == locale


@pytest.mark.parametrize("code", [0, 77])
def test_the_exit_code_is_that_of_the_command(code: int) -> None:
    assert _run("--", sys.executable, "-c", f"raise SystemExit({code})").returncode == code


def test_the_command_replaces_the_process_and_gets_its_signals() -> None:
    ended = _run("--", sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)")
    assert ended.returncode == -signal.SIGTERM


def test_run_changes_no_signal_handling() -> None:
    # Both are started by an absolute path: what a child inherits differs between posix_spawn and fork.
    tell = [shutil.which("sh") or "sh", "-c", "grep SigIgn /proc/$$/status"]
    direct = subprocess.run(tell, capture_output=True, text=True, check=True)
    assert direct.stdout.startswith("SigIgn:")
    assert _run("--", *tell).stdout == direct.stdout


def test_a_command_that_is_not_found_exits_with_127() -> None:
    for program in ("no-such-program-anywhere", "/nonexistent/program"):
        ended = _run("--", program)
        assert ended.returncode == 127
        assert ended.stderr.count("\n") == 1
        assert program in ended.stderr


def test_a_command_that_cannot_be_executed_exits_with_126(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("echo hello\n")
    headless = tmp_path / "headless"
    headless.write_text("#!/nonexistent/interpreter\n")
    headless.chmod(0o755)
    errors = {}
    for program in (plain, headless, tmp_path):
        ended = _run("--", str(program))
        assert (ended.returncode, ended.stderr.count("\n")) == (126, 1), ended.stderr
        assert str(program) in ended.stderr
        errors[program] = ended.stderr.replace(str(program), "")
    assert errors[plain] == errors[tmp_path] != errors[headless], "a program's permission and its missing interpreter"


def test_run_works_with_the_standard_library_alone() -> None:
    ended = _run("--", sys.executable, "-c", "print('ran')", python=("-I", "-S"))
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ran\n", "", 0)
