"""What a real training loop on a real device notices of its reporter: nothing, and how little that is in figures."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess
from tests.exporter_process import ExporterProcess, wait_for
from tests.integration.end_to_end_checks import QUICK

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

PREPARE = """
import hashlib, os, threading, time
torch.use_deterministic_algorithms(True)
def prepare():
    global model, optimizer
    torch.manual_seed(7)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    begun = time.monotonic()
    for _ in range(steps):
        model(torch.randn(256, 1024, device='cuda')).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return (time.monotonic() - begun) / steps
def digest():
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().cpu().numpy().tobytes())
    return whole.hexdigest()
def reporter_seconds():
    'CPU time of the reporter thread so far.'
    (thread,) = [thread for thread in threading.enumerate() if thread.name == 'gpumem-reporter']
    with open(f'/proc/self/task/{thread.native_id}/schedstat') as file:
        return int(file.read().split()[0]) / 1e9
prepare()
train(20)
"""


def start_training(start_torch: StartTorch, exporter: ExporterProcess) -> TorchProcess:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, **DETERMINISTIC)
    process.exec(PREPARE, timeout_seconds=180)
    return process


def test_training_gives_the_same_results_watched_and_not_and_while_the_exporter_comes_and_goes(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    process = start_training(start_torch, exporter)
    code = "prepare(); train(300); result = [digest(), torch.cuda.memory_stats()['allocated_bytes.all.current']]"
    alone = process.exec(code, timeout_seconds=180)
    assert process.exec(code, timeout_seconds=180) == alone, "the loop itself is not deterministic here"
    process.call("start_client")
    exporter.wait_for_processes(process.pid)
    for disturb in (lambda: None, exporter.stop, exporter.start):
        disturb()
        assert process.exec(code, timeout_seconds=180) == alone
    exporter.wait_for_processes(process.pid)
    assert "Traceback" not in process.stderr()


def test_a_training_loop_loses_less_than_five_per_cent_to_a_hundred_reports_a_second(
    start_exporter: StartExporter, start_torch: StartTorch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = start_exporter(None, "--report.interval", "0.01")
    process = start_training(start_torch, exporter)
    ratios = []
    for _ in range(15):  # in turns, so that clocks and heat change for both
        alone = process.exec("result = train(500)", timeout_seconds=180)
        process.call("start_client")
        exporter.wait_for_processes(process.pid)
        watched = process.exec("result = train(500)", timeout_seconds=180)
        process.call("stop_client")
        ratios.append(watched / alone)
    with capsys.disabled():
        print(f"\na step at 100 reports a second: {statistics.median(ratios):.4f} times one without; all {ratios}")
    assert statistics.median(ratios) < 1.05


def test_at_one_report_a_second_the_reporter_takes_less_than_six_ten_thousandths_of_a_core(
    start_exporter: StartExporter, start_torch: StartTorch, capsys: pytest.CaptureFixture[str]
) -> None:
    exporter = start_exporter(None)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url, CUDA_VISIBLE_DEVICES="0", **DETERMINISTIC)
    process.exec(PREPARE, timeout_seconds=180)
    process.call("start_client")
    exporter.wait_for_processes(process.pid)
    spent, passed = process.exec(
        "train(50)\n"  # past the first reports, which import what they need
        "begun, clock = reporter_seconds(), time.monotonic()\n"
        "while time.monotonic() - clock < 30: train(10)\n"
        "result = [reporter_seconds() - begun, time.monotonic() - clock]",
        timeout_seconds=180,
    )
    with capsys.disabled():
        print(f"\nthe reporter's thread takes {spent / passed:.6f} of a core at 1 Hz")
    assert 0 < spent / passed < 0.0006


def test_a_cache_is_not_cleared_while_a_cuda_graph_is_captured_and_the_capture_survives_the_reports(
    start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path
) -> None:
    exporter = start_exporter(None, *QUICK)
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    if not process.exec("result = hasattr(torch.cuda.graphs, 'register_graph_capture_start_hook')"):
        pytest.skip("only torch 2.14 and later say that another thread captures a graph")
    process.call("start_client")
    process.exec("spare = torch.empty(64 << 20, dtype=torch.uint8, device='cuda')\ndel spare")
    exporter.wait_for_processes(process.pid)
    capturing, go_on = tmp_path / "capturing", tmp_path / "go_on"
    asked = process.send(
        "exec",
        code=(
            "import pathlib, time\n"
            "graph, counter = torch.cuda.CUDAGraph(), torch.zeros(1, device='cuda')\n"
            "with torch.cuda.graph(graph):\n"
            "    counter += 1\n"
            "    pathlib.Path(capturing).touch()\n"
            "    while not pathlib.Path(go_on).exists(): time.sleep(0.001)\n"
            "    counter += 1\n"
            "for _ in range(3): graph.replay()\n"
            "result = counter.item()"
        ),
        capturing=str(capturing),
        go_on=str(go_on),
    )
    wait_for(capturing.exists, "the capture")
    reports = accepted(exporter)
    wait_for(lambda: accepted(exporter) > reports + 3, "reports from within the capture")
    (row,) = exporter.act("empty_cache", target={"pid": process.pid})["results"]
    assert row["outcome"] == "refused"
    assert "graph" in row["reason"]
    go_on.touch()
    assert process.receive(asked) == 6
    (row,) = exporter.act("empty_cache", target={"pid": process.pid})["results"]
    assert (row["outcome"], row["freed_bytes"] is not None) == ("done", True)


def accepted(exporter: ExporterProcess) -> float:
    return exporter.metrics().value("gpumem_reports_total", outcome="accepted")


def test_a_capture_of_this_device_is_whole_and_names_it(tmp_path: Path) -> None:
    from tests.gpu.capture import capture
    from tests.gpu.driver import books

    written = capture(tmp_path)
    assert [path.name.partition("_torch-")[0] for path in written] == [written[0].name.partition("_torch-")[0]] * 3
    text = {path.suffixes[-2]: path.read_text() for path in written}
    assert not any(book.uuid.partition("-")[2] in content for book in books() for content in text.values())
    devices: list[dict[str, Any]] = json.loads(text[".nvml"])["devices"]
    assert len(devices) == len(books())
    assert json.loads(text[".memory_stats"])["memory_stats"]["num_ooms"] == 1
    assert "gpumem_torch_reclaimable_bytes{" in text[".metrics"]
