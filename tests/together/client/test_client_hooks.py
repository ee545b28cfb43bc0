"""After `stop()`, torch and the interpreter are as they were before `start()`; in real torch on the emulated node."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.support.waiting import wait_for

STATE = """
import builtins, gc, sys, threading
import torch.optim, torch.utils.data
import gpumem_client as gpumem
import gpumem_toolkit as toolkit

optimizers = sys.modules["torch.optim.optimizer"]

def classes(module, base):
    return [each for each in vars(module).values() if isinstance(each, type) and issubclass(each, base)]

def state():
    "All that a hook could be put into, by name."
    modules = [builtins, torch, torch.cuda, torch.cuda.graphs, torch.cuda.memory, torch.optim, optimizers,
               torch.serialization, torch.nn, torch.nn.modules.module, torch.utils.data]
    kinds = [*classes(torch.optim, torch.optim.Optimizer), *classes(torch.utils.data, torch.utils.data.DataLoader),
             *classes(torch.utils.data, torch.utils.data.Dataset), torch.nn.Module, torch.Tensor, torch.cuda.CUDAGraph]
    found = {f"{each.__name__}.{name}": id(value) for each in modules for name, value in vars(each).items()
             if callable(value)}
    found |= {f"{each.__qualname__}.{name}": id(value) for each in kinds for name, value in vars(each).items()
              if name not in ("__abstractmethods__", "_abc_impl")}
    for module in (optimizers, torch.nn.modules.module, torch.cuda.graphs):
        found |= {f"{module.__name__}.{name}": list(value.values()) for name, value in vars(module).items()
                  if name.startswith("_global_") and isinstance(value, dict)}
    return found | {
        "sys.meta_path": list(sys.meta_path), "sys.path_hooks": list(sys.path_hooks),
        "torch.cuda._queued_calls": [call for call, _ in torch.cuda._queued_calls],
        "torch.serialization._package_registry": list(torch.serialization._package_registry),
        "hooks of sys": [sys.excepthook, sys.unraisablehook, threading.excepthook, sys.gettrace(), sys.getprofile()],
        "gc.callbacks": list(gc.callbacks), "switch interval": sys.getswitchinterval(),
    }

def changed(before):
    after = state()
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
"""
TRAIN = """
def train():
    model = torch.nn.Linear(64, 64, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.randn(8, 64)), batch_size=4)
    for (batch,) in loader:
        model(batch.cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


def torch_changes_itself(start_torch: StartTorch) -> set[str]:
    """Return what torch changes in itself at the first training of a process without the client."""
    return set(start_torch().exec(STATE + TRAIN + "before = state()\ntrain()\nresult = changed(before)"))


@pytest.mark.parametrize("started", ["before CUDA starts", "after it"])
def test_stop_restores_torch_and_the_interpreter(
    node: EmulatedNode, start_exporter: StartExporter, start_torch: StartTorch, tmp_path: Path, started: str
) -> None:
    exporter = start_exporter(node, "--report.interval", "0.2", "--collect.interval", "0.2")
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.exec(STATE + TRAIN)
    by_torch = set()
    if started == "before CUDA starts":
        by_torch = torch_changes_itself(start_torch)
    else:
        process.exec("train()")
    for _ in range(2):
        process.exec("before = state()\ngpumem.start()\ntrain()")
        exporter.wait_for_processes(process.pid)
        exporter.act("empty_cache", target={"pid": process.pid})
        during = process.exec("gpumem.clear_cache()\nresult = changed(before)")
        assert "torch.optim.optimizer._global_optimizer_post_hooks" in during, "it sees no hook"
        process.exec("gpumem.stop()")
        # `stop` waits 0.3 s at most for the reporter's thread, which removes the hooks on captures.
        wait_for(lambda: set(process.exec("result = changed(before)")) <= by_torch, "the state before `start`")  # noqa: B023
        by_torch = set()
        wait_for(lambda: process.pid not in exporter.processes(), "the process to be forgotten")
        process.exec("train()")


def test_stop_inside_an_optimizer_s_step_removes_the_hook_after_the_step(start_torch: StartTorch) -> None:
    process = start_torch(GPUMEM_EXPORTER_URL="unix:///nowhere/exporter.sock")
    process.exec(
        STATE
        + TRAIN
        + "train()\nbefore = state()\ngpumem.start()\n"
        + "stops = optimizers.register_optimizer_step_post_hook(lambda *_: gpumem.stop())\ntrain()\n"
        + "stops.remove()"
    )
    wait_for(lambda: process.exec("result = changed(before)") == [], "the hook to be removed")
