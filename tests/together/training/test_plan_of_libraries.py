"""The planner with the models of transformers and peft, against real training on the emulated node."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.paths import REPOSITORY
from tests.support.torch_release import with_the_planners_kernels
from tests.support.waiting import patient

_MISSING = [name for name in ("transformers", "peft") if importlib.util.find_spec(name) is None]


@pytest.mark.slow
@with_the_planners_kernels
@pytest.mark.skipif(bool(_MISSING), reason=f"the dependency group `models` is not installed: no {', '.join(_MISSING)}")
def test_planned_peaks_equal_measured_peaks(emulation: Path) -> None:
    models = ("transformers-gpt2", "peft-llama-lora")
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.planner_models", "--json", "--only", *models],
        capture_output=True,
        text=True,
        cwd=REPOSITORY,
        timeout=patient(280),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    worst = json.loads(done.stdout)["rows"][-1]
    assert worst["measured"] < 3
