"""The planner's own process, and a plan beside the training that it predicts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.planner_process import Progress, run_in_worker
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.torch_release import with_the_planners_kernels
from tests.support.waiting import patient, wait_for, wait_until_equal

PROGRAM = REPOSITORY / "tests" / "programs" / "plan_in_a_worker.py"
UNGUARDED = """
import gpumem_toolkit as toolkit

def make():
    return None

toolkit.plan(make, "float32[B,16]", "2GiB")
"""
ENDLESS = """
import os, time

with open("pid", "w") as file:
    file.write(str(os.getpid()))
time.sleep(600)
"""


def broken(*, progress: Progress) -> None:
    print("of the job")
    raise LookupError("no weights here")


def killed(*, progress: Progress) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def called(function: Callable[[], object], *, progress: Progress) -> object:
    return function()


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, (str(REPOSITORY), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_plan_of_a_script_changes_nothing_and_equals_a_plan_in_its_process(process: TorchProcess) -> None:
    process.exec("import runpy; runpy.run_path(script, run_name='__main__')", script=str(PROGRAM), timeout_seconds=110)


def test_errors_in_the_worker_have_its_traceback_and_output_goes_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="LookupError: no weights here") as failed:
        run_in_worker(broken)
    assert f'test_plan_worker.py", line {broken.__code__.co_firstlineno + 2}, in broken' in str(failed.value.__cause__)
    assert capfd.readouterr() == ("", "of the job\n")
    with pytest.raises(ConfigurationError, match="SIGKILL"):
        run_in_worker(killed)


def test_closures_are_passed_on_by_cloudpickle(monkeypatch: pytest.MonkeyPatch) -> None:
    width = 16
    assert run_in_worker(called, lambda: width) == width
    monkeypatch.setitem(sys.modules, "cloudpickle", None)  # as if it were not installed
    with pytest.raises(ConfigurationError, match="pip install cloudpickle"):
        run_in_worker(called, lambda: width)


def test_a_script_without_a_main_guard_gets_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(UNGUARDED)
    with start(tmp_path, "script.py") as process:
        _, err = process.communicate(timeout=patient(110))
    assert process.returncode == 1
    assert "if __name__ == '__main__':" in err.splitlines()[-1]


ENDLESS_PLAN = ("-m", "gpumem_exporter", "plan", "endless:make", "--input", "float32[B]", "--gpu", "1GiB")


def test_a_plan_has_a_time_limit_and_the_error_names_the_step_and_the_time(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    with start(tmp_path, *ENDLESS_PLAN, "--timeout", "0.1") as process:
        out, err = process.communicate(timeout=patient(110))
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    for value in ("0.1 s", "importing PyTorch", "--timeout"):
        assert value in err


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Child processes receive SIGINT even if the test run ignores it, as in the background of a shell."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


def test_an_interrupt_ends_the_worker_too(tmp_path: Path, interruptible: None) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    with start(tmp_path, *ENDLESS_PLAN) as process:
        pid = tmp_path / "pid"
        wait_for(lambda: pid.exists() and pid.read_text(), "the import", 60.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=patient(30))
    assert (process.returncode, err) == (130, "")
    arguments = Path(f"/proc/{pid.read_text()}/cmdline")
    wait_for(lambda: not arguments.exists() or not arguments.read_bytes(), "the worker's end")


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
