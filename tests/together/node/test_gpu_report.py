"""The report and the capture of a GPU as real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.emulation.fixtures import MakeNode
from tests.emulation.node import GIB
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient


def run(module: str, *options: str | Path, environment: Mapping[str, str] = os.environ) -> str:
    command = [sys.executable, "-m", module, *map(str, options)]
    ran = subprocess.run(
        command, env=environment, cwd=REPOSITORY, capture_output=True, text=True, timeout=patient(110), check=False
    )
    assert ran.returncode == 0, ran.stderr + ran.stdout
    return ran.stdout


def test_the_report_of_the_emulated_node_alone() -> None:
    page = run("tests.gpu.report", "--emulated-only", "--only", "memory of a device")
    assert "## Disagreements\n\nNone.\n" in page
    assert f"| free + used + reserved | {80 * GIB:,} |" in page


def test_a_capture_has_the_values_of_every_source(make_node: MakeNode, tmp_path: Path) -> None:
    device = make_node(devices=1, name="NVIDIA H200", driver_version="570.124")  # instead of a real one
    printed = run("tests.gpu.capture", "--output", tmp_path / "out", environment=device.environment())
    metrics, torch, driver = [Path(line) for line in printed.splitlines()]
    assert {path.name.partition("_torch-")[0] for path in (metrics, torch, driver)} == {"nvidia-h200_driver-570.124"}
    assert not any(device.uuid(0) in path.read_text() for path in (metrics, torch, driver))
    assert "gpumem_torch_reclaimable_bytes{" in metrics.read_text()
    assert json.loads(torch.read_text())["memory_stats"]["num_ooms"] == 1
    assert json.loads(driver.read_text())["devices"][0]["nvmlDeviceGetMemoryInfo_v2"]["total"] == 8 * GIB
