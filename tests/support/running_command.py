"""The command line, run without settings of the machine."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.support.paths import REPOSITORY
from tests.support.waiting import patient

CONSOLE_SCRIPT = (
    f"import sys; sys.path[:0] = [{str(REPOSITORY)!r}, {str(REPOSITORY / 'client')!r}]; "
    "from gpumem_exporter.cli.main import main; sys.exit(main())"
)
"""Python code that does the same as the installed `gpumem-exporter` script."""


def clean_environment(**changes: str) -> dict[str, str]:
    """Return the environment without this project's variables and those of terminals, with changes."""
    own = ("GPUMEM_", "COLUMNS", "NO_COLOR", "FORCE_COLOR")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "PYTHONPATH": str(REPOSITORY), **changes}


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
