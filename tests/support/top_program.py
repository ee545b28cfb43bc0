"""The command and the environment of `top`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping

from tests.support.paths import REPOSITORY
from tests.support.waiting import patient


def top_environment(base: Mapping[str, str] | None = None, **changes: str) -> dict[str, str]:
    """Return an environment without settings for `top`, with changes."""
    own = ("GPUMEM_", "COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR", "PYTHONPATH", "TERM")
    kept = {name: value for name, value in (base or os.environ).items() if not name.startswith(own)}
    # The emulated terminal does not know the Kitty keyboard protocol.
    own_terminal = {"TERM": "xterm", "TEXTUAL_DISABLE_KITTY_KEY": "1"}
    return {**kept, **own_terminal, "PYTHONPATH": str(REPOSITORY), **changes}


def top_command(*arguments: str) -> list[str]:
    """Return the command line of `top` with these arguments."""
    return [sys.executable, "-m", "gpumem_exporter", "top", *arguments]


def top_once(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run `top --once`."""
    return subprocess.run(
        top_command("--once", *arguments),
        env=top_environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=patient(60),
        check=False,
    )
