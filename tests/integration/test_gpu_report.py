"""The report of a GPU, run whole: an emulated node of another model stands in for the device."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.claims.figures import Claim, alike
from tests.claims.place import Place
from tests.emulation.fixtures import MakeNode
from tests.emulation.node import GIB, MIB
from tests.gpu.report import Report
from tests.support.paths import REPOSITORY

OUT_OF_MEMORY = 2


def report(*options: str | Path, environment: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.gpu.report", *map(str, options)],
        env=environment,
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )


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
    assert text.startswith("# GPU report: NVIDIA H200\n\n**The device is an emulated node, too")
    assert "| claims | 3 measured of 3; 1 disagree |" in text
    (failed,) = [line for line in text.splitlines() if line.endswith("| NO |")]
    assert failed.startswith("| pinned host memory is torch's, and on no device | the claim itself | – | failed: ")
    assert "in call\n" in text.partition("## What failed, and where")[2]  # the way there
    assert str(REPOSITORY) not in text
    # the emulated node was made as large as the device
    assert f"| total = free + used + reserved | {141 * GIB:,} | {141 * GIB:,} | yes |" in text
    assert "| 1 byte: reserved = 1 byte: used, by the driver = 1 MiB: reserved" in text


def test_a_disagreement_of_two_nodes_is_shown_as_one(make_node: MakeNode, tmp_path: Path) -> None:
    emulated, device = make_node(devices=1), make_node(devices=1, total_bytes=9 * GIB)
    claims = [
        Claim("driver's reserve", lambda place: {"reserved": alike(place.books()[0].reserved_bytes)}),
        Claim("size", lambda place: {"total": alike(place.books()[0].total_bytes)}),
    ]
    made = Report(tmp_path / "report.md", "GPU report", {}, (), len(claims))
    with Place(tmp_path / "emulated", emulated) as one, Place(tmp_path / "real", device) as other:
        assert not made.run(claims, one, other)
    assert f"| size | total | {8 * GIB:,} | {9 * GIB:,} | NO |" in (tmp_path / "report.md").read_text()


def test_without_a_device_it_says_so_and_still_prints_the_emulated_figures(tmp_path: Path) -> None:
    chosen = ("--only", "error has its figures", "--only", "lists a process", "--only", "refused during a capture")
    printed = report(*chosen, "--emulated-only", "--output", tmp_path / "out")
    assert printed.returncode == 0, printed.stderr + printed.stdout
    assert "| requested | 4,398,046,511,104 | – | yes |" in printed.stdout
    refused = report("--output", tmp_path / "out", environment={"PATH": "/usr/bin:/bin"})
    assert refused.returncode == 1
    assert refused.stderr.startswith("no report: needs a real NVIDIA GPU and its driver")
    assert "--emulated-only" in refused.stderr
    assert not (tmp_path / "out").exists()


def test_an_emulated_node_is_not_taken_for_a_device_unasked(make_node: MakeNode, tmp_path: Path) -> None:
    ran = report("--output", tmp_path / "out", environment=make_node(devices=1).environment())
    assert ran.returncode == 1
    assert "this is the emulated node" in ran.stderr
    assert not (tmp_path / "out").exists()


def test_a_claim_that_does_not_exist_is_wrong_usage() -> None:
    ran = report("--only", "no such claim")
    assert ran.returncode == 2
    assert "no claim's name contains 'no such claim'" in ran.stderr
