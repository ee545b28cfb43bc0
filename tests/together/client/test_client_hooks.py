"""After `stop()`, torch and the interpreter are as before `start()`; a training is the same with every tool."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess
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


TRAINING = """
import contextlib, copy, hashlib
from torch import nn

torch.set_num_threads(1)
torch.manual_seed(7)
model = nn.Sequential(
    nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.3),
    nn.Sequential(*(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.1)) for _ in range(4))), nn.Linear(32, 4)
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
nothing = contextlib.nullcontext

if with_tools:
    import gpumem_client as gpumem
    import gpumem_toolkit as toolkit

    gpumem.start(workload="the same", clean=True)
    toolkit.find_batch_size(lambda size: 1 / 0)
    toolkit.milestones(model, optimizer)
    toolkit.watch(model, optimizer)
    toolkit.leak_detector()
    toolkit.auto_clean()
    accumulator = toolkit.GradientAccumulator(model, optimizer, effective_batch=32, micro_batch=32)

losses = []
for step in range(16):
    x, y = torch.randn(32, 16), torch.randint(4, (32,))
    if with_tools:
        with toolkit.oom_guard(batch_size=32), gpumem.memory_context("step"):
            with gpumem.phase("forward"), accumulator.forward():
                loss = nn.functional.cross_entropy(model(x), y)
            with gpumem.phase("backward"):
                accumulator.backward(loss, samples=32)
            with gpumem.phase("optimizer"):
                assert accumulator.step()
        if step % 10 == 5:
            gpumem.log_summary(); toolkit.lingering_tensors(); gpumem.clear_cache(collect_garbage=True)
            toolkit.deep_clean(); toolkit.recommend_allocator_settings(); toolkit.to_cpu([loss])
            toolkit.compare_checkpointing(model, x, loss=lambda out: nn.functional.cross_entropy(out, y), repeats=1)
            toolkit.save_checkpoint(path, model=model, optimizer=optimizer)
            with toolkit.inference_mode(model):
                model(x)
            toolkit.optimize_model(copy.deepcopy(model), dtype=torch.bfloat16)
    else:
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    losses.append(loss.item().hex())

weights = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in model.state_dict().values())).hexdigest()
assert not torch.cuda.is_initialized()
result = {"losses": losses, "weights": weights, "next": torch.rand(1).item().hex(), "mode": model.training}
"""


def test_a_training_with_every_tool_is_the_same_to_the_bit(tmp_path: Any) -> None:
    def train(*, with_tools: bool) -> Any:
        environment: dict[str, str | None] = {name: None for name in os.environ if name.startswith("GPUMEM_")}
        with TorchProcess(None, {**environment, "CUDA_VISIBLE_DEVICES": ""}) as process:
            path = str(tmp_path / "last.pt")
            return process.exec(TRAINING, with_tools=with_tools, path=path, timeout_seconds=110)

    without = train(with_tools=False)
    assert len(set(without["losses"])) == 16
    assert train(with_tools=True) == without
