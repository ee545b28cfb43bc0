"""The planner with models and trainers of libraries, against real training on the emulated node."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.torch_release import with_the_planners_kernels
from tests.support.waiting import patient


@pytest.mark.slow
@with_the_planners_kernels
@pytest.mark.parametrize(
    ("benchmark", "packages", "models"),
    [
        ("planner_models", ("transformers", "peft"), ("transformers-gpt2", "peft-llama-lora")),
        ("planner_trainers", ("transformers", "accelerate", "lightning"), ("llama-bf16", "lightning-bf16")),
    ],
)
def test_planned_peaks_equal_measured_peaks(
    emulation: Path, benchmark: str, packages: tuple[str, ...], models: tuple[str, ...]
) -> None:
    for package in packages:
        pytest.importorskip(package)
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{benchmark}", "--json", "--only", *models],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=patient(280),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    worst = json.loads(done.stdout)["rows"][-1]
    assert worst["measured"] < 5
