"""A small training in a real PyTorch process, on an emulated node and on a machine without a GPU."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess

PARAMETERS_BYTES = 4 * (256 * 256 + 256) * 4
"""Bytes of the model of TRAINING in fp32."""

TRAINING = """
import contextlib, gc
import gpumem_client as gpumem
import gpumem_toolkit as toolkit

def make(device="cuda:0", **options):
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (torch.nn.Linear(256, 256), torch.nn.GELU())]
    model = torch.nn.Sequential(*layers).to(device)
    return model, torch.optim.AdamW(model.parameters(), **options)

def step(model, optimizer, around=lambda name: contextlib.nullcontext(), batch=2048, zero=True):
    device = next(model.parameters()).device
    with around("forward"):
        loss = model(torch.randn(batch, 256, device=device)).square().mean()
    with around("backward"):
        loss.backward()
    with around("optimizer"):
        optimizer.step()
    if zero:
        optimizer.zero_grad()
    return loss.item()
"""


@pytest.fixture(scope="module")
def process_of_the_module(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[TorchProcess]:
    """Return a process on its own node, with the functions of TRAINING."""
    node = EmulatedNode(tmp_path_factory.mktemp("node") / "node")
    with contextlib.closing(node), TorchProcess(node) as process:
        process.exec(TRAINING + "names = {*globals(), 'names'}")
        yield process


@pytest.fixture
def shared_process(process_of_the_module: TorchProcess) -> Iterator[TorchProcess]:
    """Return the shared process after freeing the allocations of earlier tests."""
    yield process_of_the_module
    process_of_the_module.exec(
        """
for name in set(globals()) - names - {"__builtins__"}:
    del globals()[name]
gc.enable()
gc.collect()
"""
    )
