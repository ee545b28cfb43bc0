"""The report of a GPU, run whole: an emulated node of another model stands in for the device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.emulation.fixtures import MakeNode
from tests.emulation.node import GIB, MIB
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient

OUT_OF_MEMORY = 2


def report(*options: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.report", *map(str, options)],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=patient(110),
        check=False,
    )


@pytest.mark.slow
def test_the_report_has_both_columns_and_a_claim_that_fails_on_the_device_fails_alone(
    make_node: MakeNode, tmp_path: Path
) -> None:
    device = make_node(
        devices=1, total_bytes=141 * GIB, reserved_bytes=600 * MIB, name="NVIDIA H200", driver_version="570.124"
    )
    chosen = ("--only", "segments: classic", "--only", "give a device's memory", "--only", "pinned host memory")
    with device.fail("cudaHostAlloc", OUT_OF_MEMORY):
        ran = report(*chosen, "--device-is-emulated", "--output", tmp_path / "out", environment=device.environment())
    assert ran.returncode == 1, ran.stderr
    (path,) = (tmp_path / "out").iterdir()
    assert ran.stdout == f"{path}\n"
    assert path.name.startswith("gpu-report-NVIDIA-H200-570.124-2.")
    text = path.read_text()
    assert "NVIDIA H200" in text.splitlines()[0]
    (failed,) = [line for line in text.splitlines() if line.endswith("| NO |")]
    assert failed.startswith("| pinned host memory ")
    assert "in call\n" in text.rpartition("```text")[2]  # the traceback
    assert str(REPOSITORY) not in text
    # the emulated node was made as large as the device
    assert f"| total = free + used + reserved | {141 * GIB:,} | {141 * GIB:,} | yes |" in text


def test_without_a_device_it_says_so_and_still_prints_the_emulated_figures(tmp_path: Path) -> None:
    chosen = ("--only", "error has its figures", "--only", "lists a process", "--only", "refused during a capture")
    printed = report(*chosen, "--emulated-only", "--output", tmp_path / "out")
    assert printed.returncode == 0, printed.stderr + printed.stdout
    assert "| requested | 4,398,046,511,104 | – | yes |" in printed.stdout
    refused = report("--output", tmp_path / "out", environment={"PATH": "/usr/bin:/bin"})
    assert refused.returncode == 1
    assert "--emulated-only" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_an_emulated_node_is_not_taken_for_a_device_unasked(make_node: MakeNode, tmp_path: Path) -> None:
    ran = report("--output", tmp_path / "out", environment=make_node(devices=1).environment())
    assert ran.returncode == 1
    assert "--device-is-emulated" in ran.stderr
    assert not (tmp_path / "out").exists()
