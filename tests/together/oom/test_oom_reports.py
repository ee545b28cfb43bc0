"""Out-of-memory errors reach the exporter complete, once, and even if they end the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess
from tests.support.recording_exporter import RecordingExporter
from tests.support.waiting import patient, wait_for

RUN_OUT = "torch.empty(1 << 40, dtype=torch.uint8, device='cuda:1')"


def _ooms(exporter: RecordingExporter) -> dict[int, dict[str, Any]]:
    return {oom["number"]: oom for report in exporter.reports for oom in report.get("ooms", [])}


class Start(Protocol):
    """Starts a process that reports, with an allocation on the second device."""

    def __call__(self, hold_seconds: float = 30.0, **environment: str) -> tuple[TorchProcess, RecordingExporter]: ...


@pytest.fixture
def start(start_torch: StartTorch, tmp_path: Path) -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def started(hold_seconds: float = 30.0, **environment: str) -> tuple[TorchProcess, RecordingExporter]:
            # The exporter delays its first answer: only an error starts a new report.
            exporter = stack.enter_context(RecordingExporter(tmp_path / "exporter.sock", hold_seconds=hold_seconds))
            process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, **environment)
            process.call("start_client")
            process.call("alloc", nbytes=1 << 20, device=1)
            wait_for(lambda: exporter.reports, "the first report")
            return process, exporter

        yield started


@pytest.mark.parametrize("settings", ["expandable_segments:True", ""], ids=["expandable", "classic"])
def test_unallocated_memory_at_an_error_is_fragmented_without_a_recent_walk(start: Start, settings: str) -> None:
    """PyTorch has emptied its cache: a clear right afterwards releases nothing."""
    process, exporter = start(PYTORCH_CUDA_ALLOC_CONF=settings)
    reserved, allocated, cleared = process.exec(
        "held = [torch.empty(11 << 20, dtype=torch.uint8, device='cuda:1') for _ in range(40)][::2]\n"
        f"try:\n    {RUN_OUT}\nexcept torch.OutOfMemoryError: pass\n"
        "result = [torch.cuda.memory_reserved(1), torch.cuda.memory_allocated(1)]\n"
        "torch.cuda.empty_cache()\n"
        "result.append(torch.cuda.memory_reserved(1))"
    )
    wait_for(lambda: _ooms(exporter), "the error")
    (oom,) = _ooms(exporter).values()
    assert (oom["sample"]["reserved_bytes"], oom["sample"]["allocated_bytes"]) == (reserved, allocated)
    assert oom["sample"]["reclaimable_bytes"] == reserved - cleared == 0
    assert not settings or reserved - allocated > 20 << 20, "pages that tensors occupy"


def test_reclaimable_memory_is_unknown_at_an_error_during_a_graph_capture(start: Start) -> None:
    """PyTorch does not empty its cache then."""
    process, exporter = start(PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")
    reserved, cleared = process.exec(
        "import warnings; warnings.simplefilter('ignore')\n"
        "held = torch.empty(50 << 20, dtype=torch.uint8, device='cuda:1')\n"
        "torch.cuda.set_device(1)\n"
        "graph = torch.cuda.CUDAGraph()\n"
        "try:\n    with torch.cuda.graph(graph):\n"
        "        del held\n"
        "        torch.empty(1 << 40, dtype=torch.uint8, device='cuda:1')\n"
        "except RuntimeError: pass\n"
        "result = [torch.cuda.memory_reserved(1)]\n"
        "del graph; torch.cuda.empty_cache()\n"
        "result.append(torch.cuda.memory_reserved(1))"
    )
    wait_for(lambda: _ooms(exporter), "the error")
    (oom,) = _ooms(exporter).values()
    assert reserved > cleared
    assert "reclaimable_bytes" not in oom["sample"]


ENDINGS = {
    "a caught error": f"try:\n    {RUN_OUT}\nexcept torch.OutOfMemoryError:\n    sys.exit(1)",
    "os._exit shortly after": (
        f"try:\n    {RUN_OUT}\nexcept torch.OutOfMemoryError:\n    time.sleep({patient(0.5)})\n    os._exit(1)"
    ),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_an_error_that_ends_the_process_is_reported(start: Start, ending: str) -> None:
    process, exporter = start()
    assert process.end_with(ENDINGS[ending]) == 1
    wait_for(lambda: _ooms(exporter), "the error")
    assert [oom["requested_bytes"] for oom in _ooms(exporter).values()] == [1 << 40]


def test_under_cuda_malloc_async_no_error_is_reported(start: Start) -> None:
    process, exporter = start(0.0, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    process.exec(f"try:\n    {RUN_OUT}\nexcept torch.OutOfMemoryError:\n    caught = True")
    assert process.exec("result = caught")
    reports = len(exporter.reports)
    wait_for(lambda: len(exporter.reports) >= reports + 3, "three reports after it")
    assert _ooms(exporter) == {}


def test_a_rejected_result_does_not_stop_the_reports(start: Start) -> None:
    _, exporter = start(0.0)
    exporter.refuses = lambda report: bool(report.get("results"))
    exporter.commands = [{"id": "a", "action": "empty_cache", "deadline_seconds": 30}]
    wait_for(lambda: any(report.get("results") for report in exporter.reports), "the result")
    refused = len(exporter.reports)
    wait_for(lambda: len(exporter.reports) > refused + 2, "reports after it")
    assert not any(report.get("results") for report in exporter.reports[refused:])
