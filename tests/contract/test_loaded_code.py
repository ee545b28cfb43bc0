"""How much of the client a training process loads, as long as nobody asks it for a profile or a snapshot."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.support.paths import REPOSITORY
from tests.support.recording_exporter import RecordingExporter
from tests.support.waiting import patient, wait_for

pytestmark = pytest.mark.tools

LINES_MAX = 7_800
"""Lines with blanks."""
MODULES_MAX = 54

TRAINING = """
import sys
import torch
import gpumem_client
gpumem_client.start()
held = torch.zeros(1 << 20, device="cuda")
sys.stdin.readline()
for name in sorted(sys.modules):
    if name.partition(".")[0] == "gpumem_client":
        with open(sys.modules[name].__file__) as file:
            print(name, sum(1 for _ in file))
"""


def test_a_training_process_loads_no_code_that_no_command_has_asked_for(node: EmulatedNode, tmp_path: Path) -> None:
    with RecordingExporter(tmp_path / "exporter.sock") as exporter:
        environment = {**node.environment(), "GPUMEM_EXPORTER_URL": exporter.url}
        training = subprocess.Popen(
            [sys.executable, "-c", TRAINING],
            env={**environment, "PYTHONPATH": str(REPOSITORY / "client")},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        with training:
            try:
                wait_for(lambda: len(exporter.reports) > 1 and exporter.reports[1]["devices"], "a report of a device")
                output, _ = training.communicate("\n", timeout=patient(60))
            finally:
                training.kill()
    lines = {name: int(number) for name, number in map(str.split, output.splitlines())}
    print(*sorted(lines.items(), key=lambda each: -each[1]), sep="\n")
    assert "gpumem_client.reporter.report_loop" in lines
    folders = {name.split(".")[1] for name in lines if "." in name}
    assert not folders & {"objects", "profile"}
    assert sum(lines.values()) <= LINES_MAX
    assert len(lines) <= MODULES_MAX
