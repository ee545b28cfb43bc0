"""Out-of-memory errors: the series of their events, also after the end of process or exporter, and their phases."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpumem_exporter.core.event import EVENT_TYPES
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.servers.recording_exporter import RecordingExporter
from tests.support.waiting import patient, wait_for

VALUES = ("requested", "device_free", "limit", "allocated", "reserved", "reclaimable", "fragmented")
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0"}
RUN_OUT = "torch.empty(1 << 40, dtype=torch.uint8, device='cuda:1')"
CAUGHT = f"try:\n    {RUN_OUT}\nexcept torch.OutOfMemoryError: pass"


def ooms(exporter: ExporterProcess) -> list[dict[str, Any]]:
    """Return the events with all numbers as text."""
    answer = exporter.request("GET", "/api/v1/events?type=oom&limit=1000")
    assert answer.status == 200, answer
    found: list[dict[str, Any]] = json.loads(answer.body, parse_int=str, parse_float=str)["events"]
    return found


def series_of(event: dict[str, Any]) -> list[str]:
    """Return the expected lines of an event."""
    names = ("gpu", "uuid", "pid", "workload", "rank")
    labels = ",".join(f'{name}="{event[name]}"' for name in names)
    detail = event["detail"]
    known = {"timestamp_seconds": event["unix_seconds"]}
    for name in VALUES:
        values = detail if name in ("requested", "device_free", "limit") else detail["allocator"]
        known[f"{name}_bytes"] = values[f"{name}_bytes"]
    return [f"gpumem_last_oom_{name}{{{labels}}} {value}" for name, value in known.items() if value is not None]


def shown(exporter: ExporterProcess, **headers: str) -> list[str]:
    answer = exporter.request("GET", "/metrics", headers=headers)
    return [line for line in answer.body.decode().splitlines() if line.startswith("gpumem_last_oom_")]


def counted(exporter: ExporterProcess) -> dict[str, float]:
    metrics = exporter.metrics()
    return {type_: metrics.value("gpumem_events_total", type=type_) for type_ in EVENT_TYPES}


def test_a_caught_error_shows_the_values_of_its_event_in_both_formats(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(node, *QUICK)
    assert counted(exporter) == dict.fromkeys(EVENT_TYPES, 0)
    assert shown(exporter) == []
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="greedy", rank=2)
    process.call("random_heap", device=1, seed=5)
    exporter.wait_for_processes(process.pid)
    for number in (1, 2):
        process.exec(CAUGHT)
        wait_for(lambda number=number: len(ooms(exporter)) == number, "the error")  # type: ignore[misc]
        event = ooms(exporter)[-1]
        assert (event["pid"], event["workload"], event["detail"]["number"]) == (str(process.pid), "greedy", str(number))
        lines = series_of(event)
        assert len(lines) == 1 + len(VALUES)
        assert shown(exporter) == shown(exporter, **OPENMETRICS) == lines
    assert counted(exporter) == {**dict.fromkeys(EVENT_TYPES, 0), "oom": 2, "process_started": 1}


def test_errors_outlive_process_and_exporter_and_are_critical_if_their_process_has_ended(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(node, *QUICK, "--report.expiry", "2", "--storage.path", str(tmp_path / "events"))
    processes = {}
    for name in ("fails", "is killed", "goes on"):
        processes[name] = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
        processes[name].call("start_client", workload=name.replace(" ", "-"))
        processes[name].call("alloc", nbytes=1 << 28, device=1)
        exporter.wait_for_processes(processes[name].pid)
        if name != "fails":
            processes[name].exec(CAUGHT)
    assert processes["fails"].end_with(RUN_OUT) == 1
    assert "OutOfMemoryError" in processes["fails"].stderr()
    found = {"fails": "critical", "is-killed": "warning", "goes-on": "warning"}
    wait_for(lambda: severities(exporter) == found, "the errors, and the end of one process")
    lines = sorted(line for event in ooms(exporter) for line in series_of(event))
    assert sorted(shown(exporter)) == lines
    assert f'{{gpu="1",uuid="{node.uuid(1)}",pid="{processes["fails"].pid}",workload="fails"' in "".join(lines)
    assert exporter.stop(signal.SIGKILL) == -signal.SIGKILL
    processes["is killed"].kill()
    exporter.start()
    wait_for(lambda: severities(exporter) == {**found, "is-killed": "critical"}, "the end that no exporter saw")
    assert sorted(shown(exporter)) == lines
    assert counted(exporter)["oom"] == 0


def severities(exporter: ExporterProcess) -> dict[str, str]:
    """Return the severity of the finding of each workload with an error."""
    findings = exporter.get("/api/v1/live")["findings"]
    return {each["sentence"].split()[0]: each["severity"] for each in findings if each["kind"] == "oom"}


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
    details = sorted((event["detail"] for event in ooms(exporter)), key=lambda detail: int(detail["number"]))
    assert [detail["phase"] for detail in details] == PHASES
    assert details[3]["requested_bytes"] == str(2 << 30)
    assert "fine-tuning" in exporter.metrics().text  # as the phase of a peak, not of an error
    assert 'gpumem_last_oom_timestamp_seconds{gpu="0"' in exporter.metrics().text
    assert not any("phase=" in line for line in exporter.metrics().text.splitlines() if "_last_oom_" in line)


def _ooms(exporter: RecordingExporter) -> dict[int, dict[str, Any]]:
    return {oom["number"]: oom for report in exporter.reports for oom in report.get("ooms", [])}


Start = Callable[..., tuple[TorchProcess, RecordingExporter]]


@pytest.fixture
def start(start_torch: StartTorch, tmp_path: Path) -> Iterator[Start]:
    """Start a process that reports, with an allocation on the second device."""
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
        f"{CAUGHT}\n"
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
