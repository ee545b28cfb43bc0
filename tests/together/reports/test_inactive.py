"""Who holds memory and does nothing: real PyTorch processes beside each other on one device."""

from __future__ import annotations

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, EmulatedNode
from tests.support.builders import MIB
from tests.support.waiting import eventually


def test_a_notebook_that_sleeps_is_inactive_and_a_job_that_only_allocates_for_a_moment_is_not(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.1")
    notebook, evaluation = (start_torch(GPUMEM_EXPORTER_URL=exporter.url) for _ in range(2))
    for process, size in ((notebook, 2765 * MIB), (evaluation, GIB)):
        process.call("alloc", nbytes=size)
        process.call("start_client", workload="notebook" if process is notebook else "eval")
        exporter.wait_for_processes(process.pid)

    def last(pid: int) -> float:
        return exporter.metrics().value("gpumem_process_last_activity_timestamp_seconds", pid=str(pid))

    def reported(pid: int) -> float:
        return exporter.metrics().value("gpumem_reporter_last_report_timestamp_seconds", pid=str(pid))

    slept, evaluated = last(notebook.pid), last(evaluation.pid)

    def both_moved_on() -> bool:
        # What is allocated is the same in every sample.
        evaluation.exec("x = torch.empty(1 << 20, device='cuda:0'); del x")
        return reported(notebook.pid) > slept + 4 and last(evaluation.pid) > evaluated + 4

    eventually(both_moved_on, bool)
    assert last(notebook.pid) == slept
    notebook.exec("x = torch.empty(1 << 20, device='cuda:0'); del x")
    eventually(lambda: last(notebook.pid), lambda now: now > slept + 2)
