"""The report of a GPU as a real process."""

from __future__ import annotations

import sys

from tests.emulation.node import GIB
from tests.support.running_command import run_tool


def test_the_report_of_the_emulated_node_alone() -> None:
    command = ("-m", "tests.gpu.report", "--emulated-only", "--only", "memory of a device")
    ran = run_tool(sys.executable, *command)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "## Disagreements\n\nNone.\n" in ran.stdout
    assert f"| free + used + reserved | {80 * GIB:,} |" in ran.stdout
