"""The phase of an out-of-memory error is the phase that the allocation belongs to, in any thread."""

from __future__ import annotations

from typing import Any

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

QUICK = ("--report.interval", "0.2", "--collect.interval", "0.2")
SCENES = """
import threading
from gpumem_exporter.client import memory_context, phase

GIB = 1 << 30
threads = []

def bytes_of(size):
    return torch.empty(size, dtype=torch.uint8, device="cuda")

def fails(work):
    try:
        work()
    except torch.OutOfMemoryError:
        return
    raise AssertionError("the allocation succeeded")

def in_a_thread(work, *arguments):
    raised = []
    def run():
        try:
            work(*arguments)
        except BaseException as error:
            raised.append(error)
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]

# A real backward whose gradient does not fit.
weights = torch.zeros(GIB // 2, device="cuda", requires_grad=True)
loss = (weights * weights).sum()
ballast = bytes_of(2 * GIB), bytes_of(2 * GIB)

def too_much():
    bytes_of(1 << 40)

def backward():
    loss.backward(retain_graph=True)

fails(too_much)
with phase("forward"):
    fails(too_much)
    with memory_context("a block that is not a phase"):
        fails(too_much)
    in_a_thread(fails, too_much)  # has no phase, because it works for no other thread
    in_a_thread(fails, backward)
with phase("step"), phase("backward"):
    fails(backward)

other_runs, may_end = threading.Event(), threading.Event()

def other():
    with phase("loader"):
        other_runs.set()
        may_end.wait(60)

with phase("backward"):
    thread = threading.Thread(target=other)
    thread.start()
    other_runs.wait(60)
    fails(backward)  # the most recent phase is in another thread
    may_end.set()
    thread.join()

def with_a_phase_of_its_own():
    with phase("fine-tuning"):
        fails(backward)

in_a_thread(with_a_phase_of_its_own)

class Inner(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        threads.append(threading.get_ident())
        with phase("recomputed"):
            fails(too_much)
        too_much()

def inner():
    Inner.apply(torch.ones(1, device="cuda", requires_grad=True)).sum().backward()

with phase("backward"):
    try:
        inner()
    except torch.OutOfMemoryError:
        pass
result = threads != [threading.get_ident()] and len(threads) == 1
"""
PHASES = [
    None,
    "forward",
    "forward",
    None,
    None,
    "backward",
    "backward",
    "fine-tuning",
    "recomputed",
    "backward",
]


def ooms(exporter: ExporterProcess) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = exporter.get("/api/v1/events?type=oom&limit=1000")["events"]
    return found


def test_an_error_has_the_phase_of_its_thread_or_of_the_thread_it_works_for(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client")
    process.call("alloc", nbytes=1)
    exporter.wait_for_processes(process.pid)
    assert process.exec(SCENES)  # backward ran in an autograd thread
    wait_for(lambda: len(ooms(exporter)) == len(PHASES), "the errors")
    details = sorted((event["detail"] for event in ooms(exporter)), key=lambda detail: detail["number"])
    assert [detail["phase"] for detail in details] == PHASES
    assert details[5]["requested_bytes"] == 2 << 30
    lines = [line for line in exporter.log().splitlines() if 'msg="out of memory"' in line]
    assert [line.partition(" phase=")[2].partition(" ")[0] for line in lines] == [phase or '""' for phase in PHASES]
    assert "fine-tuning" in exporter.metrics().text  # as the phase of a peak, not of an error
    assert 'gpumem_last_oom_timestamp_seconds{gpu="0"' in exporter.metrics().text
    assert not any("phase=" in line for line in exporter.metrics().text.splitlines() if "_last_oom_" in line)
