"""`gpumem-exporter run` as a process, and what the commands import."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.processes.running_command import CONSOLE_SCRIPT, environment_without
from tests.support.waiting import patient


def _run(
    *arguments: str, python: tuple[str, ...] = (), environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`gpumem-exporter run` in its own process, as the console script starts it."""
    return subprocess.run(
        [sys.executable, *python, "-c", CONSOLE_SCRIPT, "run", *arguments],
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
        env=environment_without("GPUMEM_", "PYTHONPATH") if environment is None else environment,
    )


@pytest.mark.parametrize("locale", [{}, {"LC_ALL": "C"}])
def test_the_command_gets_the_original_locale(locale: dict[str, str]) -> None:
    ended = _run("--", "/usr/bin/env", environment=locale)
    variables = dict(line.split("=", 1) for line in ended.stdout.splitlines())
    assert {name: value for name, value in variables.items() if name.startswith("LC_")} == locale


def test_the_command_replaces_the_process() -> None:
    code = "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"
    assert _run("--", sys.executable, "-c", code).returncode == -signal.SIGTERM


def test_run_changes_no_signal_handling() -> None:
    # Both are started by an absolute path: what a child inherits differs between posix_spawn and fork.
    tell = [shutil.which("sh") or "sh", "-c", "grep SigIgn /proc/$$/status"]
    direct = subprocess.run(tell, capture_output=True, text=True, check=True)
    assert direct.stdout.startswith("SigIgn:")
    assert _run("--", *tell).stdout == direct.stdout


def test_a_command_that_cannot_start_exits_with_126_or_127(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("echo hello\n")
    headless = tmp_path / "headless"
    headless.write_text("#!/nonexistent/interpreter\n")
    headless.chmod(0o755)
    missing = dict.fromkeys(("no-such-program-anywhere", "/nonexistent/program"), 127)
    errors = {}
    for program, code in {**missing, **dict.fromkeys(map(str, (plain, headless, tmp_path)), 126)}.items():
        ended = _run("--", program)
        assert (ended.returncode, ended.stderr.count("\n")) == (code, 1), ended.stderr
        assert program in ended.stderr
        errors[program] = ended.stderr.replace(program, "")
    found = [errors[str(path)] for path in (plain, tmp_path, headless)]
    assert found[0] == found[1] != found[2], "a program's permission and its missing interpreter"


def test_run_works_with_the_standard_library_alone() -> None:
    ended = _run("--", sys.executable, "-c", "print('ran')", python=("-I", "-S"))
    assert (ended.stdout, ended.stderr, ended.returncode) == ("ran\n", "", 0)


def _main(*arguments: str, without: str = "") -> subprocess.CompletedProcess[str]:
    """Run the console script in a process that cannot import the module `without`."""
    block = f"sys.modules[{without!r}] = None; " if without else ""
    script = (
        f"import sys; sys.path.insert(0, {str(REPOSITORY)!r}); {block}"
        "from gpumem_exporter.main import main; code = main(); "
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.__stderr__); sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", script, *arguments], capture_output=True, text=True, timeout=patient(60), check=False
    )


def test_plan_without_the_toolkit_says_what_to_install() -> None:
    ended = _main("plan", "--help", without="gpumem_toolkit")
    assert ended.returncode == 2
    assert ended.stdout == ""
    assert "gpumem-toolkit" in ended.stderr.splitlines()[0]
    assert _main("--help", without="gpumem_toolkit").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "unwanted"),
    [
        (("--version",), {"rich", "pydantic"}),
        (("run", "--help"), {"rich", "click", "pydantic", "argparse"}),
        (("serve", "--log.level", "nonsense"), {"rich", "textual", "fastapi", "uvicorn", "pynvml"}),
        (("clear",), {"rich", "textual", "fastapi", "uvicorn", "pynvml", "prometheus_client"}),
        (
            ("top", "--once", "--json", "--url", "unix:///nonexistent.sock"),
            {"rich", "textual", "fastapi", "uvicorn", "pynvml"},
        ),
    ],
)
def test_a_command_imports_only_what_it_needs(arguments: tuple[str, ...], unwanted: set[str]) -> None:
    ended = _main(*arguments)
    imported = set(ended.stderr.splitlines()[-1].split())
    assert "gpumem_exporter" in imported
    assert imported & unwanted == set()
