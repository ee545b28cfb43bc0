"""The idle cache of real PyTorch processes on the emulated node, with a window of a few seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

SEGMENT = 64 * MIB
WINDOW_SECONDS = 3.0
"""More than twice the interval of reports: after a longer gap between two readings the window starts again."""
START = """
from dataclasses import replace
import gpumem_client as client
from gpumem_client.reporter.reporter import process_reporter
from gpumem_client.reporter.reporter_settings import ReporterSettings

process_reporter().start(replace(ReporterSettings.resolve(), idle_cache_seconds=seconds))

def tensors(count):
    return [torch.empty(64 << 20, dtype=torch.uint8, device="cuda") for _ in range(count)]

def in_thread(loop):
    import threading, time
    ended = threading.Event()
    def run():
        while not ended.is_set():
            loop(time.sleep)
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    def stop():
        ended.set()
        thread.join()
    return stop

weights = tensors(1)
"""


class Job:
    """A reporting process with weights of one segment."""

    def __init__(self, exporter: ExporterProcess, process: TorchProcess) -> None:
        self.exporter = exporter
        self.process = process
        process.exec(START, seconds=WINDOW_SECONDS)
        exporter.wait_for_processes(process.pid)

    def cache(self) -> tuple[int | None, int | None]:
        """Return the reclaimable bytes and the idle cache."""
        (device,) = self.process_document()["devices"]
        return device["reclaimable_bytes"], device["idle_cache_bytes"]

    def process_document(self) -> Any:
        """Return what `/api/v1/processes` has of the process."""
        return self.exporter.processes()[self.process.pid]

    def run(self, code: str) -> Any:
        return self.process.exec(code)


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[Job]:
    folder = tmp_path_factory.mktemp("node")
    with EmulatedNode(folder / "node") as node:
        exporter = ExporterProcess(folder, environment=node.environment())
        process = TorchProcess(node, {"GPUMEM_EXPORTER_URL": exporter.url})
        try:
            yield Job(exporter, process)
        finally:
            process.close()
            exporter.close()


def test_the_idle_cache_of_a_server_is_what_its_bursts_leave(job: Job) -> None:
    job.run(
        "model = tensors(6); del model\n"
        "def burst(sleep):\n"
        "    requests = tensors(2); sleep(0.25); del requests; sleep(0.42)\n"
        "stop = in_thread(burst)"
    )
    try:
        wait_for(lambda: job.cache()[1] == 4 * SEGMENT, "the bytes that no burst needs")
    finally:
        job.run("stop()")


def test_activations_that_come_and_go_are_not_idle(job: Job) -> None:
    """At the end of each step the whole cache is reclaimable, and a clear would release it for one step."""
    job.run(
        "def step(sleep):\n"
        "    activations = tensors(5); sleep(0.08); del activations; client.step(); sleep(0.02)\n"
        # The peaks show nothing of the steps: they are below an older peak.
        "torch.cuda.empty_cache(); stop = tensors(8); del stop; torch.cuda.empty_cache(); stop = in_thread(step)"
    )

    try:
        # By then nothing of the window is older than the loop.
        wait_for(lambda: (job.process_document()["step"] or 0) >= 20 * WINDOW_SECONDS, "steps of two windows")
        reclaimable, idle = job.cache()
    finally:
        job.run("stop()")
    assert reclaimable is not None
    assert idle is not None
    assert reclaimable >= 5 * SEGMENT
    assert idle <= SEGMENT
