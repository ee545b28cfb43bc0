"""With every tool in use, a training has the same losses, weights and random numbers, to the bit."""

from __future__ import annotations

import os
from typing import Any

from tests.emulation.torch_process import TorchProcess

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
