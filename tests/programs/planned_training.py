"""Training on the emulated node, compared with the plan of the same job. The functions run in a process with torch."""

from __future__ import annotations

import gc
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.search import Sizing
from gpumem_toolkit.planning.simulation import gathered, trace_job
from gpumem_toolkit.planning.trace import replay

LARGE, WORKSPACE = 1 << 18, 32 << 20  # PyTorch's convolutions take a workspace for each sample, the plan has one


def train(model: nn.Module, *shape: int, precision: str = "fp32", steps: int = 3, **options: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    for _ in range(steps):
        x = torch.zeros(*shape).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            out = model(x)
            loss = out.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def job(make_model: Any, tensor: str, **options: Any) -> Job:
    return Job(make_model, [parse_tensor(tensor)], loss="mean", **options)


class Branches(nn.Module):
    """Sums of gradients, copies of inputs in another layout, and temporary memory of kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        x = x + self.depthwise(x)
        x = self.norm(x.permute(0, 2, 3, 1))
        x = self.linear(x.transpose(1, 2)).flatten(1, 2)
        x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
        x = x.gather(1, torch.zeros_like(x, dtype=torch.int64))
        heads = x.view(x.shape[0], -1, 4, 16).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        return self.first(x.transpose(1, 2).reshape(-1, 64, 16, 16)[:, :3])


def large(sizes: Any) -> list[tuple[int, int]]:
    return sorted(Counter(size for size in sizes if size > LARGE and size != WORKSPACE).items())


def planned_allocations_are_those_of_the_device(precision: str) -> None:
    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.cuda.memory._record_memory_history(context=None)
    train(Branches().cuda(), 16, 3, 16, 16, precision=precision)
    events = torch.cuda.memory._snapshot()["device_traces"][0]
    trace = trace_job(job(Branches, "float32[B,3,16,16]", convolution="native", precision=precision), 16)
    peaks = replay(trace)
    real = [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]
    assert [peaks.allocated_bytes, peaks.reserved_bytes] == real
    # Of autocast's temporaries, some that live for a moment are not planned.
    if precision == "fp32":
        allocated = large(event["size"] for event in events if event["action"] == "alloc")
        assert large(trace.sizes[event] for event in trace.events if event > 0) == allocated
    freed = [event for event in trace.events if event < 0 and trace.kinds[-event] == "parameters"]
    assert freed == [], "the last step repeats the one before it"


class Network(nn.Module):
    """A recurrent network without its last states."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.network(x)[0]


class Cells(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.LSTMCell(256, 384), nn.GRUCell(384, 384)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, outputs = None, None, []
        for step in x.unbind(1):
            first = self.one(step, first)
            second = self.two(first[0], second)
            outputs.append(second)
        return torch.stack(outputs, 1)


def lstm() -> nn.Module:
    return Network(nn.LSTM(256, 384, 2, batch_first=True, dropout=0.1, proj_size=128))


def gru() -> nn.Module:
    return Network(nn.GRU(256, 384, 2, batch_first=True, bidirectional=True))


def rnn() -> nn.Module:
    return Network(nn.RNN(256, 384, 2, batch_first=True))


def recurrent_networks_are_planned_as_cuda_runs_them_without_cudnn() -> None:
    torch.backends.cudnn.enabled = False
    for make_model, precision in ((lstm, "fp32"), (lstm, "bf16"), (gru, "fp32"), (rnn, "fp32"), (Cells, "fp32")):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        train(make_model().cuda(), 64, 12, 256, precision=precision)
        real = torch.cuda.max_memory_reserved()
        sizing = Sizing(job(make_model, "float32[B,12,256]", precision=precision, convolution="native"))
        assert sizing.peaks(64).reserved_bytes == real, (make_model, precision)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16))
        self.head = nn.Linear(1024, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.body:
            x = block(x)
        return self.head(x)


def a_sharded_plan_is_close_to_fully_shard() -> None:
    """One rank of four: collectives of this backend do nothing."""
    from torch.distributed.fsdp import fully_shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    model = Blocks().cuda()
    for block in model.body:
        fully_shard(block)
    fully_shard(model)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    train(model, 4096, 1024)
    real, whole = torch.cuda.max_memory_reserved(), Sizing(job(Blocks, "float32[B,1024]"))
    assert whole.sharded(4, gathered(whole.job)).peaks(4096).reserved_bytes == pytest.approx(real, rel=0.05)
    assert real < 0.9 * whole.peaks(4096).reserved_bytes


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)


def the_planned_batch_trains_and_a_quarter_more_does_not() -> None:
    free_bytes, _ = torch.cuda.mem_get_info()
    options = {"optimizer": "adamw", "optimizer_options": {"fused": True}, "precision": "bf16"}
    batch = Sizing(job(encoder, "float32[B,64,256]", **options)).largest(int(0.85 * free_bytes))
    assert batch > 100
    train(encoder().cuda(), batch, 64, 256, precision="bf16", steps=10, fused=True)
    gc.collect()
    torch.cuda.empty_cache()
    with pytest.raises(torch.OutOfMemoryError):
        train(encoder().cuda(), batch * 5 // 4, 64, 256, precision="bf16", steps=10, fused=True)
