"""Every claim of `tests/claims`, and a training loop with and without a reporter, on a real device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.claims.place import Place
from tests.claims.table import CLAIMS, check
from tests.claims.values import Claim
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.exporter_process import QUICK, ExporterProcess

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """Return this machine with one exporter and the shared processes."""
    with Place(tmp_path_factory.mktemp("place")) as place:
        yield place


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.name)
def test_a_claim_is_true(claim: Claim, place: Place) -> None:
    check(claim, place)


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


def test_training_has_the_same_results_without_the_client_with_it_and_while_the_exporter_restarts(
    start_exporter: StartExporter, start_torch: StartTorch
) -> None:
    exporter = start_exporter(None, *QUICK)
    process = start_training(start_torch, exporter)
    code = "prepare(); train(300); result = [digest(), torch.cuda.memory_stats()['allocated_bytes.all.current']]"
    alone = process.exec(code, timeout_seconds=180)
    assert process.exec(code, timeout_seconds=180) == alone, "the loop is not deterministic"
    process.call("start_client")
    exporter.wait_for_processes(process.pid)
    for disturb in (lambda: None, exporter.stop, exporter.start):
        disturb()
        assert process.exec(code, timeout_seconds=180) == alone
    exporter.wait_for_processes(process.pid)
    assert "Traceback" not in process.stderr()
