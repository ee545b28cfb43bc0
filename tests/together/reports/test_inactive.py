"""Who holds memory and does nothing: real PyTorch processes beside each other on one device."""

from __future__ import annotations

import os

from gpumem_client.wire.protocol import DeviceSample
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, EmulatedNode
from tests.support.builders import MIB
from tests.support.waiting import eventually
from tests.together.reports.test_space import command, report_this_process


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


def test_a_job_without_activity_for_hours_is_named_with_what_it_holds(
    node: EmulatedNode, start_exporter: StartExporter
) -> None:
    exporter, pid = start_exporter(node), os.getpid()
    for other in (pid, 999_999):
        node.set_process(other, 0, 3 * GIB)
    sample = DeviceSample(node.books()[0].uuid, allocated_bytes=2 * GIB, reserved_bytes=2 * GIB, reclaimable_bytes=0)
    report_this_process(exporter, 1, sample, workload="forgotten", inactive_seconds=9 * 3600.0 + 60)
    shown = eventually(lambda: command(exporter.url, "info"), lambda text: "without any activity" in text)
    assert "forgotten" in shown
    assert "has held 3.0 GiB for 9 h without any activity." in " ".join(shown.split())
    assert "inactive 9 h" in shown
    report_this_process(exporter, 2, sample, workload="forgotten", inactive_seconds=0.0)
    eventually(lambda: command(exporter.url, "info"), lambda text: "inactive" not in text)
