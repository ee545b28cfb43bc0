"""A plan and the training that it predicts: the exporter shows the error of the plan."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_until_equal

QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2")
PLANNED, ERROR = "gpumem_torch_planned_reserved_peak_bytes", "gpumem_torch_plan_error_ratio"
PLAN = """
import contextlib, io, sys
from gpumem_exporter.cli.main import main
sys.path.insert(0, folder)
out = io.StringIO()
with contextlib.redirect_stdout(out):
    code = main(words)
result = code, out.getvalue()
"""
RUN = (sys.executable, "-m", "gpumem_exporter", "run")
MODEL = """
from torch import nn

def make():
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(1024, 1024), nn.GELU())))
"""
START = """
import sys
sys.path.insert(0, folder)
from planned_model import make
model = make().cuda()
optimizer = torch.optim.AdamW(model.parameters())
"""
STEP = """
optimizer.zero_grad()
model(torch.zeros(batch, 1024, device="cuda")).mean().backward()
optimizer.step()
result = torch.cuda.max_memory_reserved()
"""


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    """The plan of `gpumem-exporter plan` for the training below."""
    (tmp_path / "planned_model.py").write_text(MODEL)
    words = ("planned_model:make", "--input", "float32[B,1024]", "--loss", "mean", "--gpu", "8GiB", "--json")
    batch = ("--no-changes", "--target-effective-batch", "256")
    with TorchProcess(None) as process:
        code, text = process.exec(PLAN, folder=str(tmp_path), words=("plan", *words, *batch), timeout_seconds=120)
        assert code == 0, process.stderr()
    assert json.loads(text)["batch"] == 256
    path = tmp_path / "plan.json"
    path.write_text(text)
    return path


def shown(exporter: ExporterProcess, pid: int) -> tuple[list[float], list[float]]:
    """Return the plan and its error on /metrics."""
    metrics = exporter.metrics()
    return metrics.values(PLANNED, pid=str(pid)), metrics.values(ERROR, pid=str(pid))


@pytest.mark.slow
def test_the_error_of_a_plan_is_exported_from_the_second_step_on_and_an_invalid_plan_is_ignored(
    plan: Path, node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    planned = json.loads(plan.read_text())["reserved_peak_bytes"]
    garbage = tmp_path / "garbage.json"
    garbage.write_text("from    the model\ndevice  80 GiB\n")
    exporter = start_exporter(node, *QUICK)
    planned_job = start_torch(launcher=(*RUN, "--plan", str(plan), "--"), GPUMEM_EXPORTER_URL=exporter.url)
    bare = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    misled = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_PLAN=str(garbage))
    for process in (bare, misled):
        process.call("start_client")
    processes = (planned_job, bare, misled)
    for process in processes:
        process.exec(START, folder=str(tmp_path))
    exporter.wait_for_processes(*(process.pid for process in processes))
    for step, batch in ((1, 256), (2, 256), (3, 4096)):
        measured = [process.exec(STEP, batch=batch) for process in processes]
        wait_until_equal(
            lambda: [exporter.processes()[process.pid]["step"] for process in processes], [step] * 3, "the step"
        )
        error = [planned / measured[0] - 1] if step > 1 else []
        assert shown(exporter, planned_job.pid) == ([planned], error)
        assert shown(exporter, bare.pid) == shown(exporter, misled.pid) == ([], [])
        if step == 2:
            assert abs(error[0]) < 0.05
    assert error[0] < -0.2  # the last batch was not the planned one
    (device,) = exporter.processes()[planned_job.pid]["devices"]
    assert (device["planned_reserved_peak_bytes"], device["plan_error_ratio"]) == (planned, *error)
    assert device["reserved_peak_bytes"] == measured[0]
    # the plan changes no statistic of the allocator
    stats: list[dict[str, Any]] = [process.call("stats") for process in processes]
    assert stats[0] == stats[1] == stats[2]
    lines = [line for line in misled.stderr().splitlines() if "plan" in line]
    assert len(lines) == 1, lines
    assert re.search(rf"{re.escape(str(garbage))}.*gpumem-exporter plan.*--json", lines[0])
    assert "plan" not in planned_job.stderr() + bare.stderr()


def test_a_program_passes_a_plan_and_it_is_exported_for_the_device_with_the_highest_peak(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_PLAN="/nowhere/of/the/environment.json")
    process.call("start_client", plan={"reserved_peak_bytes": 64 << 20})
    process.call("alloc", nbytes=30 << 20, device=0)
    process.call("alloc", nbytes=128 << 20, device=1)
    exporter.wait_for_processes(process.pid)
    for _ in range(2):
        process.call("client_step")
    wait_until_equal(lambda: shown(exporter, process.pid), ([64 << 20], [-0.5]), "the error")
    assert exporter.metrics().values(ERROR, gpu="1") == [-0.5]
    # a reset peak restarts at the reserved bytes, which include the cache, so that the error stays
    process.call("free")
    process.call("reset_peak", device=1)
    process.call("client_step")
    wait_until_equal(lambda: exporter.processes()[process.pid]["step"], 3, "the step")
    assert shown(exporter, process.pid) == ([64 << 20], [-0.5])
