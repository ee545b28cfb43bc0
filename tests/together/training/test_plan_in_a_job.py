"""A plan and the training that it predicts: the exporter shows the error of the plan."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.paths import REPOSITORY
from tests.support.torch_release import with_the_planners_kernels
from tests.support.waiting import patient, wait_until_equal

PLANNED, ERROR = "gpumem_torch_planned_reserved_peak_bytes", "gpumem_torch_plan_error_ratio"


def shown(exporter: ExporterProcess, pid: int) -> tuple[list[float], list[float]]:
    """Return the plan and its error on /metrics."""
    metrics = exporter.metrics()
    return metrics.values(PLANNED, pid=str(pid)), metrics.values(ERROR, pid=str(pid))


def test_the_error_of_a_plan_is_exported_for_the_device_with_the_highest_peak_and_an_invalid_plan_is_ignored(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_PLAN="/nowhere/of/the/environment.json")
    process.call("start_client", plan={"reserved_peak_bytes": 64 << 20})
    process.call("alloc", nbytes=30 << 20, device=0)
    process.call("alloc", nbytes=128 << 20, device=1)
    exporter.wait_for_processes(process.pid)
    for step, error in ((1, []), (2, [-0.5])):
        process.call("client_step")
        wait_until_equal(lambda: exporter.processes()[process.pid]["step"], step, "the step")
        wait_until_equal(lambda: shown(exporter, process.pid), ([64 << 20], error), "the error")
    assert exporter.metrics().values(ERROR, gpu="1") == [-0.5]
    device = next(
        each for each in exporter.processes()[process.pid]["devices"] if each.get("plan_error_ratio") is not None
    )
    assert (device["planned_reserved_peak_bytes"], device["plan_error_ratio"]) == (64 << 20, -0.5)
    # a reset peak restarts at the reserved bytes, which include the cache, so that the error stays
    process.call("free")
    process.call("reset_peak", device=1)
    process.call("client_step")
    wait_until_equal(lambda: exporter.processes()[process.pid]["step"], 3, "the step")
    assert shown(exporter, process.pid) == ([64 << 20], [-0.5])

    garbage = tmp_path / "garbage.json"
    garbage.write_text("from    the model\ndevice  80 GiB\n")
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_PLAN=str(garbage))
    process.call("start_client")
    process.call("alloc", nbytes=30 << 20)
    exporter.wait_for_processes(process.pid)
    for _ in range(2):
        process.call("client_step")
    wait_until_equal(lambda: exporter.processes()[process.pid]["step"], 2, "the step")
    assert shown(exporter, process.pid) == ([], [])
    (line,) = [line for line in process.stderr().splitlines() if "plan" in line]
    assert re.search(rf"{re.escape(str(garbage))}.*gpumem-exporter plan.*--json", line)


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
