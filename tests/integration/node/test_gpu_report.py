"""The report of a GPU as a real process."""

from __future__ import annotations

import subprocess
import sys

from tests.emulation.node import GIB
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient


def test_the_report_of_the_emulated_node_alone() -> None:
    command = [sys.executable, "-m", "tests.gpu.report", "--emulated-only", "--only", "memory of a device"]
    ran = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=patient(110), check=False)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "## Disagreements\n\nNone.\n" in ran.stdout
    assert f"| free + used + reserved | {80 * GIB:,} |" in ran.stdout
