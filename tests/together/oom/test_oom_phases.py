"""The phase of an out-of-memory error is the phase that the allocation belongs to, in any thread."""

from __future__ import annotations

from typing import Any

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_for

SCENES = """
import threading
from gpumem_client import phase

GIB = 1 << 30
threads = []

def fails(work):
    try:
        work()
    except torch.OutOfMemoryError:
        return
    raise AssertionError("the allocation succeeded")

def in_a_thread(work):
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

# A real backward whose gradient does not fit.
weights = torch.zeros(GIB // 2, device="cuda", requires_grad=True)
loss = (weights * weights).sum()
ballast = [torch.empty(2 * GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]

def too_much():
    torch.empty(1 << 40, dtype=torch.uint8, device="cuda")

def backward():
    loss.backward(retain_graph=True)

fails(too_much)
with phase("forward"):
    fails(too_much)
    in_a_thread(lambda: fails(too_much))  # has no phase, because it works for no other thread
with phase("step"), phase("backward"):
    fails(backward)

def in_the_most_recent_phase():
    with phase("fine-tuning"):
        fails(backward)

with phase("backward"):
    in_a_thread(in_the_most_recent_phase)
    fails(backward)

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

with phase("backward"):
    fails(Inner.apply(torch.ones(1, device="cuda", requires_grad=True)).sum().backward)
result = threads != [threading.get_ident()] and len(threads) == 1
"""
PHASES = [None, "forward", None, "backward", "fine-tuning", "backward", "recomputed", "backward"]


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
    assert details[3]["requested_bytes"] == 2 << 30
    lines = [line for line in exporter.log().splitlines() if 'msg="out of memory"' in line]
    assert [line.partition(" phase=")[2].partition(" ")[0] for line in lines] == [phase or '""' for phase in PHASES]
    assert "fine-tuning" in exporter.metrics().text  # as the phase of a peak, not of an error
    assert 'gpumem_last_oom_timestamp_seconds{gpu="0"' in exporter.metrics().text
    assert not any("phase=" in line for line in exporter.metrics().text.splitlines() if "_last_oom_" in line)
