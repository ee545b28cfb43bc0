"""The planner's own process: it returns the plan and changes nothing in the caller's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient, wait_for

MODEL = """
from torch import nn

def make():
    print("text from the factory")
    return nn.Linear(16, 16)

def broken():
    raise LookupError("no weights here")

def killed():
    import os
    os.kill(os.getpid(), 9)
"""
IN_A_JOB = """
import gc, os, random, sys, threading
sys.path.insert(0, folder)
import mine
import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.plan import Target
from gpumem_toolkit.planning.planner import plan_job
from gpumem_toolkit.planning.devices import parse_gpu

def state():
    x = torch.ones(2, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        softmax = torch.softmax(x, 0).dtype
    keys = "AutocastCPU", "AutogradCPU"
    return {
        "collector": gc.isenabled(),
        "kernels": [sorted(torch._C._dispatch_get_registrations_for_dispatch_key(key)) for key in keys],
        "softmax": str(softmax),
        "dtype": str(torch.get_default_dtype()),
        "device": str(torch.get_default_device()),
        "random": [hash(torch.get_rng_state().numpy().tobytes()), hash(random.getstate())],
        "cuda": torch.cuda.is_initialized(),
        "environment": dict(os.environ),
        "path": list(sys.path),
        "threads": threading.active_count(),
    }

def plan(make):
    return toolkit.plan(make, "float64[B,16]", "1GiB", optimizer="sgd", changes=False)

width = 16
closure = plan(lambda: torch.nn.Linear(width, width))
sys.modules["cloudpickle"] = None  # as if it were not installed
torch.set_default_dtype(torch.float64)
before = state()
planned = plan(mine.make)
after = state()
errors = {}
for make in (mine.broken, mine.killed, lambda: None):
    try:
        plan(make)
    except ConfigurationError as error:
        errors[make.__name__] = [str(error), str(error.__cause__)]
job = Job(mine.make, [parse_tensor("float64[B,16]")], optimizer="sgd")
here = plan_job(job, parse_gpu("1GiB"), Target(), changes=False)
result = {
    "changed": [name for name in before if before[name] != after[name]],
    "same": planned == here,
    "parameters": [each.breakdown["parameters"] for each in (closure, planned)],
    "errors": errors,
}
"""
SCRIPT = """
from torch import nn
import gpumem_toolkit as toolkit

class Job:
    def __init__(self, width):
        self.width = width

    def make(self):
        return nn.Linear(self.width, self.width)

def plan():
    return toolkit.plan(Job(16).make, "float32[B,16]", "1GiB", changes=False)

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


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("job")
    (folder / "mine.py").write_text(MODEL)
    with TorchProcess(None) as process:
        result: dict[str, Any] = process.exec(IN_A_JOB, folder=str(folder), timeout_seconds=110)
        assert process.stderr().count("text from the factory") > 0
    return result


def test_a_plan_changes_nothing_in_the_process_of_the_caller(job: dict[str, Any]) -> None:
    assert job["changed"] == []


def test_the_worker_s_plan_equals_the_caller_s_and_uses_the_caller_s_default_dtype(job: dict[str, Any]) -> None:
    assert job["same"] is True
    assert job["parameters"] == [4 * (16 * 16 + 16), 8 * (16 * 16 + 16)]


def test_errors_of_the_model_have_the_traceback_of_the_worker(job: dict[str, Any]) -> None:
    text, cause = job["errors"]["broken"]
    assert "LookupError: no weights here" in text
    assert 'mine.py", line 9, in broken' in cause
    assert "SIGKILL" in job["errors"]["killed"][0]
    assert "cloudpickle" in job["errors"]["<lambda>"][0]


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
