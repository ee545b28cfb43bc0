"""The planner against real training on the emulated node: three jobs of the table in benchmarks/planner.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPOSITORY
from tests.support.torch_release import with_the_planners_kernels
from tests.support.waiting import patient


def compare(*words: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner", "--json", *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=patient(280),
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@with_the_planners_kernels
@pytest.mark.slow
def test_planned_peaks_equal_measured_peaks(emulation: Path) -> None:
    code, results, output = compare("--peaks", "--only", "cnn-adamw-bf16", "mlp-adamw-fused-bf16")
    assert code == 0, output
    assert max(row["measured"] for row in results["rows"] if row["unit"] == "%") < 5


@pytest.mark.slow
def test_the_planned_batch_trains_and_a_quarter_more_does_not(emulation: Path) -> None:
    code, results, output = compare("--only", "transformer-flash-adamw-fused-bf16")
    assert code == 0, output
    (trained,) = [row for row in results["rows"] if "50 steps" in row["what"]]
    (refused,) = [row for row in results["rows"] if "1.25 times" in row["what"]]
    assert (trained["measured"], trained["passed"]) == (0, True)
    assert (refused["measured"], refused["passed"]) == (0, True)
