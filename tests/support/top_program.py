"""The command and the environment of `top`, and a demo for it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.exporter_process import ExporterProcess
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient, wait_for

FOREIGN = 4_000_001
"""The pid of no process."""


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


def top_without_default_exporter(socket: Path, *arguments: str) -> list[str]:
    """Return the command line of `top` with `socket` as the default socket."""
    code = (
        "import os, sys; from gpumem_exporter.cli.main import main\n"
        "from gpumem_exporter.cli import options; urls = options.exporter_urls\n"
        "is_named = lambda url: url is not None or 'GPUMEM_EXPORTER_URL' in os.environ\n"
        f"options.exporter_urls = lambda url: urls(url) if is_named(url) else ('unix://{socket}',)\n"
        "sys.exit(main())"
    )
    return [sys.executable, "-c", code, "top", *arguments]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    """Return an exporter of the demo after most processes have reported."""
    exporter = ExporterProcess(tmp_path_factory.mktemp("demo"), "--demo")
    try:
        wait_for(lambda: len(exporter.processes()) >= 12, "a dozen reporting processes")
        yield exporter
    finally:
        exporter.close()
