"""Programs that run until they exit: the command line, a fresh interpreter, and the tools of Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.support.paths import REPOSITORY
from tests.support.waiting import patient

CONSOLE_SCRIPT = (
    f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / 'client')!r}]; "
    "from gpumem_exporter.main import main; sys.exit(main())"
)
"""Python code that does the same as the installed `gpumem-exporter` script."""


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the environment without this project's variables and those of terminals, with changes."""
    kept = environment_without("GPUMEM_", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    return {**kept, "PYTHONPATH": str(REPOSITORY), **changes}


def environment_without(*starts: str) -> dict[str, str]:
    """Return the environment without the variables whose names start with these texts."""
    return {name: value for name, value in os.environ.items() if not name.startswith(starts)}


def run_command(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Run `gpumem-exporter …` until it exits."""
    return subprocess.run(
        [sys.executable, "-m", "gpumem_exporter", *arguments],
        capture_output=True,
        text=True,
        timeout=patient(100),
        check=False,
        env=clean_environment(**environ),
    )


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter. The environment is added to this process' environment."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
        cwd=REPOSITORY,
    )


def run_tool(
    name: str, *words: str | Path, cwd: Path = REPOSITORY, stdin: str = "", environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a tool of Prometheus or Alertmanager, such as promtool."""
    path = shutil.which(name)
    assert path, f"{name} is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    return subprocess.run(
        [path, *words],
        cwd=cwd,
        input=stdin,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(100),
        check=False,
    )


def promtool_tests(folder: Path, *tests: Mapping[str, Any], interval: str = "15s") -> None:
    """Assert that promtool finds what the tests expect of series with a sample each interval.

    A test has the series as `input_series`, a mapping from names to values.
    """
    given = [
        {
            **test,
            "interval": interval,
            "input_series": [{"series": name, "values": values} for name, values in test["input_series"].items()],
        }
        for test in tests
    ]
    document = {"rule_files": [], "evaluation_interval": interval, "tests": given}
    (folder / "tests.json").write_text(json.dumps(document))  # JSON is YAML
    ran = run_tool("promtool", "test", "rules", folder / "tests.json")
    assert ran.returncode == 0, ran.stdout + ran.stderr


def promtool_check(expression: str, seconds: float, expected: Mapping[str, float]) -> dict[str, Any]:
    """Return the check of a test that an expression has exactly these values, by labels, at a time."""
    samples = [{"labels": labels, "value": value} for labels, value in expected.items()]
    return {"expr": expression, "eval_time": f"{seconds:.0f}s", "exp_samples": samples}
