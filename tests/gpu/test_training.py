"""What a real training loop on a real device notices of its reporter: nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

PREPARE = """
import hashlib
torch.use_deterministic_algorithms(True)
def prepare():
    global model, optimizer
    torch.manual_seed(7)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(1024, 1024), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
def train(steps):
    for _ in range(steps):
        model(torch.randn(256, 1024, device='cuda')).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
def digest():
    whole = hashlib.sha256()
    for parameter in model.parameters():
        whole.update(parameter.detach().cpu().numpy().tobytes())
    return whole.hexdigest()
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
