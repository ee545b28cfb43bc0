"""The planner against real training on the emulated node: three jobs of the longer table in benchmarks/planner.md."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.paths import REPOSITORY


def compare(*words: str) -> tuple[int, dict[str, Any], str]:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner", "--json", *words],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=280,
    )
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout), done.stderr


@pytest.mark.timeout(300)
def test_planned_peaks_are_the_measured_ones(emulation: Path) -> None:
    code, told, said = compare("--peaks", "--only", "cnn-adamw-bf16", "mlp-adamw-fused-bf16")
    rows = {row["what"]: row for row in told["rows"]}
    assert code == 0, said
    assert rows["reserved peak, error, worst"]["measured"] < 5


@pytest.mark.timeout(300)
def test_the_planned_batch_trains_and_a_quarter_more_does_not(emulation: Path) -> None:
    code, told, said = compare("--only", "transformer-flash-adamw-fused-bf16")
    assert code == 0, said
    held = [row["what"] for row in told["rows"] if row["held"]]
    assert "planned batches that do not train 50 steps" in held
    assert "1.25 times as many samples that do train" in held
