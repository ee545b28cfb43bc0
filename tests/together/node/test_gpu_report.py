"""The report and the capture of a GPU as real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.emulation.fixtures import MakeNode
from tests.emulation.node import GIB
from tests.support.running_command import run_tool


def test_the_report_of_the_emulated_node_alone() -> None:
    command = ("-m", "tests.gpu.report", "--emulated-only", "--only", "memory of a device")
    ran = run_tool(sys.executable, *command)
    assert ran.returncode == 0, ran.stderr + ran.stdout
    assert "## Disagreements\n\nNone.\n" in ran.stdout
    assert f"| free + used + reserved | {80 * GIB:,} |" in ran.stdout


def test_a_capture_has_the_values_of_every_source(make_node: MakeNode, tmp_path: Path) -> None:
    device = make_node(devices=1, name="NVIDIA H200", driver_version="570.124")  # instead of a real one
    command = ("-m", "tests.gpu.capture", "--output", str(tmp_path / "out"))
    ran = run_tool(sys.executable, *command, environment=device.environment())
    assert ran.returncode == 0, ran.stderr + ran.stdout
    metrics, torch, driver = [Path(line) for line in ran.stdout.splitlines()]
    assert not any(device.uuid(0) in path.read_text() for path in (metrics, torch, driver))
    assert "gpumem_torch_reclaimable_bytes{" in metrics.read_text()
    assert json.loads(torch.read_text())["memory_stats"]["num_ooms"] == 1
    assert json.loads(driver.read_text())["devices"][0]["nvmlDeviceGetMemoryInfo_v2"]["total"] == 8 * GIB
