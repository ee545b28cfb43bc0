"""The planner's own process: it returns the plan and changes nothing in the caller's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient, wait_for

SCRIPT = """
from torch import nn
import gpumem_toolkit as toolkit

class Job:
    def __init__(self, width):
        self.width = width

    def make(self):
        return nn.Linear(self.width, self.width)

def plan():
    return toolkit.plan(Job(16).make, "float32[B,16]", "2GiB", changes=False)

"""
GUARDED = SCRIPT + 'if __name__ == "__main__":\n    print(plan().breakdown["parameters"])\n'
UNGUARDED = SCRIPT + "plan()\n"
ENDLESS = """
import os, time

def make():
    with open("pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
"""


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


@pytest.mark.parametrize(
    "scenario",
    [
        "a_plan_changes_nothing_and_equals_a_plan_in_the_process_of_the_caller",
        "errors_of_the_model_have_the_traceback_of_the_worker",
        "closures_are_passed_on_by_cloudpickle",
    ],
)
def test_a_worker(process: TorchProcess, scenario: str) -> None:
    process.call_program("plan_in_a_worker", scenario)


@pytest.mark.parametrize(("script", "code"), [(GUARDED, 0), (UNGUARDED, 1)], ids=["guarded", "unguarded"])
def test_a_script_can_plan_its_own_model_under_a_main_guard(tmp_path: Path, script: str, code: int) -> None:
    (tmp_path / "script.py").write_text(script)
    with start(tmp_path, "script.py") as process:
        out, err = process.communicate(timeout=patient(110))
    assert process.returncode == code, err
    if code:
        assert "if __name__ == '__main__':" in err.splitlines()[-1]
    else:
        assert out == f"{4 * (16 * 16 + 16)}\n"


ENDLESS_PLAN = ("-m", "gpumem_exporter", "plan", "endless:make", "--input", "float32[B]", "--gpu", "1GiB")


def test_a_plan_has_a_time_limit_and_the_error_names_the_step_and_the_time(tmp_path: Path) -> None:
    (tmp_path / "endless.py").write_text(ENDLESS)
    with start(tmp_path, *ENDLESS_PLAN, "--timeout", "0.1") as process:
        out, err = process.communicate(timeout=patient(110))
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    for value in ("0.1 s", "importing PyTorch", "--timeout"):
        assert value in err
    assert not (tmp_path / "pid").exists()


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
        wait_for(lambda: pid.exists() and pid.read_text(), "the factory", 60.0)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=patient(30))
    assert (process.returncode, err) == (130, "")
    arguments = Path(f"/proc/{pid.read_text()}/cmdline")
    wait_for(lambda: not arguments.exists() or not arguments.read_bytes(), "the worker's end")
