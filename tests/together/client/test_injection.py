"""`gpumem-exporter run -- CMD`: unchanged programs and their children report."""

from __future__ import annotations

import sys

import pytest

from tests.emulation.fixtures import StartTorch
from tests.support.processes.injected_scripts import (
    MIB,
    StartScript,
    exporter,
    run_to_the_end,
    start_script,
    wait_for_allocated,
)
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

__all__ = ["exporter", "start_script"]

RUN = (sys.executable, "-m", "gpumem_exporter", "run", "--")


def test_a_plain_script_reports_without_a_change_in_its_code(
    exporter: ExporterProcess, start_script: StartScript
) -> None:
    program = start_script("hold(3)\nsay([threads(), os.getpid()])\nwait()", GPUMEM_WORKLOAD="plain", RANK="5")
    assert program.heard() == [["gpumem-reporter"], program.pid]
    wait_for_allocated(exporter, {(program.pid, "0"): 3 * MIB})
    process = exporter.processes()[program.pid]
    assert (process["workload"], process["rank"], process["own_pid"]) == ("plain", "5", program.pid)
    assert process["command"].endswith("script0.py")
    program.go()
    assert program.finish() == 0
    assert program.stderr() == ""
    wait_for_allocated(exporter, {})


CHILD = """
import multiprocessing, sys, time
def child(mebibytes, pipe):
    hold(mebibytes)
    pipe.send([os.getpid(), threads()])
    pipe.recv()
"""


@pytest.mark.parametrize("method", ["forkserver", "fork"])
def test_children_of_multiprocessing_report_and_a_parent_without_cuda_does_not(
    exporter: ExporterProcess, start_script: StartScript, method: str
) -> None:
    program = start_script(
        CHILD
        + (
            "if __name__ == '__main__':\n"
            "    import torch\n"
            f"    context = multiprocessing.get_context({method!r})\n"
            "    pipes = [context.Pipe() for _ in range(2)]\n"
            "    children = [context.Process(target=child, args=(i + 1, far)) for i, (_, far) in enumerate(pipes)]\n"
            "    for each in children: each.start()\n"
            "    say([near.recv() for near, _ in pipes])\n"
            "    wait()\n"
            "    for near, _ in pipes: near.send(None)\n"
            "    for each in children: each.join()\n"
            "    say([[each.exitcode for each in children], threads()])\n"
        )
    )
    children = program.heard(120)
    pids = [pid for pid, _ in children]
    assert [names for _, names in children] == [["gpumem-reporter"]] * 2
    wait_for_allocated(exporter, {(pids[0], "0"): MIB, (pids[1], "0"): 2 * MIB})
    program.go()
    assert run_to_the_end(program) == ([[0, 0], []], "")
    wait_for_allocated(exporter, {})


@pytest.mark.parametrize("first", ["start", "cuda"])
def test_a_program_that_starts_the_client_itself_has_one_reporter(
    exporter: ExporterProcess, start_torch: StartTorch, first: str
) -> None:
    process = start_torch(launcher=RUN, GPUMEM_EXPORTER_URL=exporter.url, GPUMEM_WORKLOAD="environment")
    for action in (first, "cuda" if first == "start" else "start"):
        if action == "start":
            process.call("start_client", workload="argument")
        else:
            process.call("alloc", nbytes=MIB)
    exporter.wait_for_processes(process.pid)
    code = "import threading; result = [t.name for t in threading.enumerate() if t.name.startswith('gpumem')]"
    assert process.exec(code) == ["gpumem-reporter"]
    (entry,) = exporter.processes().values()
    assert entry["workload"] == "environment", "the operator's, not the script's"
    process.call("start_client", workload="argument")
    told = [line for line in process.stderr().splitlines() if "'argument'" in line]
    assert len(told) == (first == "start"), "the script is told once that its labels are not used"
    assert len(exporter.metrics().values("gpumem_reporter_up")) == 1
    process.call("stop_client")
    wait_for(lambda: not exporter.processes(), "the reporter to be gone")
    assert process.exec(code) == []
    assert process.finish() == 0


@pytest.mark.parametrize("url", ["http://[", "unix:///nonexistent/exporter.sock"])
def test_an_invalid_or_unreachable_exporter_url_does_not_affect_the_program(
    start_script: StartScript, url: str
) -> None:
    program = start_script(
        "hold(1)\nimport torch\nsay([torch.cuda.memory_allocated(), int(held.numel())])", GPUMEM_EXPORTER_URL=url
    )
    said, stderr = run_to_the_end(program)
    assert said == [MIB, MIB]
    assert "Traceback" not in stderr
    # a missing exporter is not logged; an invalid address is
    assert ("this process is not reported" in stderr) == (not url.startswith("unix:///"))
