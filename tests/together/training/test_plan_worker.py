"""The planner's own process: it returns the plan and changes nothing in the caller's process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.planner_process import Progress, run_in_worker
from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient, wait_for

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
