"""The planner against real training on the emulated node: single operators, and jobs of benchmarks/planner.md."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.emulation.fixtures import MakeNode
from tests.emulation.torch_process import TorchProcess
from tests.support.torch_release import with_the_planners_kernels

# Sums of gradients, copies of inputs in another layout, and temporary memory of kernels.
BRANCHES = """
import torch
from torch import nn
from torch.nn import functional

class Branches(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Conv2d(3, 64, 3, padding=1)
        self.depthwise = nn.Conv2d(64, 64, 3, padding=1, groups=64)
        self.norm = nn.LayerNorm(64)
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        x = self.first(x)
        x = x + self.depthwise(x)
        x = self.norm(x.permute(0, 2, 3, 1))
        x = self.linear(x.transpose(1, 2)).flatten(1, 2)
        x = x + (x @ x.transpose(1, 2)).softmax(-1) @ x
        x = x.gather(1, torch.zeros_like(x, dtype=torch.int64))
        heads = x.view(x.shape[0], -1, 4, 16).transpose(1, 2)
        x = functional.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)
        return self.first(x.transpose(1, 2).reshape(-1, 64, 16, 16)[:, :3])
"""
STEPS = """
import pathlib, sys
pathlib.Path(folder, "branches.py").write_text(model)
sys.path.insert(0, folder)
from collections import Counter
from branches import Branches
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.simulation import trace_job
from gpumem_toolkit.planning.trace import replay

LARGE, WORKSPACE = 1 << 18, 32 << 20  # PyTorch's convolutions take a workspace for each sample, the plan has one

def large(sizes):
    return sorted(Counter(s for s in sizes if s > LARGE and s != WORKSPACE).items())

torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(False)
torch.cuda.memory._record_memory_history(context=None)
model = Branches().cuda()
optimizer = torch.optim.AdamW(model.parameters())
for _ in range(3):
    x = torch.zeros(16, 3, 16, 16).cuda()
    with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
        out = model(x)
        loss = out.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
events = torch.cuda.memory._snapshot()["device_traces"][0]
real = large(e["size"] for e in events if e["action"] == "alloc")

inputs = [parse_tensor("float32[B,3,16,16]")]
trace = trace_job(Job(Branches, inputs, loss="mean", convolution="native", precision=precision), 16)
planned = large(trace.sizes[event] for event in trace.events if event > 0)
parameters = [event for event in trace.events if event < 0 and trace.kinds[-event] == "parameters"]
peaks = replay(trace)
result = {
    "real": [real, torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()],
    "planned": [planned, peaks.allocated_bytes, peaks.reserved_bytes],
    "freed parameters": len(parameters),
}
"""


SHARDED = """
import pathlib, sys
pathlib.Path(folder, "blocks.py").write_text(model)
sys.path.insert(0, folder)
import torch.distributed
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from blocks import Blocks
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.search import Sizing

# One rank of four: collectives of this backend do nothing.
torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
model = Blocks().cuda()
for block in model.body:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
for _ in range(3):
    out = model(torch.zeros(4096, 1024).cuda())
    loss = out.mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
whole = Sizing(Job(Blocks, [parse_tensor("float32[B,1024]")], loss="mean"))
planned = whole.sharded(4).peaks(4096).reserved_bytes
result = [planned, torch.cuda.max_memory_reserved(), whole.peaks(4096).reserved_bytes]
"""
BLOCKS = """
from torch import nn

class Blocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.ModuleList(nn.Sequential(nn.Linear(1024, 1024), nn.GELU()) for _ in range(16))
        self.head = nn.Linear(1024, 512)

    def forward(self, x):
        for block in self.body:
            x = block(x)
        return self.head(x)
"""


RECURRENT = """
import gc, pathlib, sys
pathlib.Path(folder, "networks.py").write_text(model)
sys.path.insert(0, folder)
import networks
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.search import Sizing

torch.backends.cudnn.enabled = False
result = {}
for name, precision in (("lstm", "fp32"), ("lstm", "bf16"), ("gru", "fp32"), ("rnn", "fp32"), ("cells", "fp32")):
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    model = getattr(networks, name)().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        x = torch.zeros(64, 12, 256).cuda()
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            out = model(x)
            loss = out.mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    real = torch.cuda.max_memory_reserved()
    del model, optimizer, x, out, loss
    job = Job(
        getattr(networks, name), [parse_tensor("float32[B,12,256]")],
        loss="mean", precision=precision, convolution="native",
    )
    result[name + " " + precision] = [Sizing(job).peaks(64).reserved_bytes, real]
"""
NETWORKS = """
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, x):
        return self.network(x)[0]

class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.LSTMCell(256, 384), nn.GRUCell(384, 384)

    def forward(self, x):
        first, second, outputs = None, None, []
        for step in x.unbind(1):
            first = self.one(step, first)
            second = self.two(first[0], second)
            outputs.append(second)
        return torch.stack(outputs, 1)

def lstm():
    return Network(nn.LSTM(256, 384, 2, batch_first=True, dropout=0.1, proj_size=128))

def gru():
    return Network(nn.GRU(256, 384, 2, batch_first=True, bidirectional=True))

def rnn():
    return Network(nn.RNN(256, 384, 2, batch_first=True))

def cells():
    return Cells()
"""


@with_the_planners_kernels
def test_recurrent_networks_are_planned_as_cuda_runs_them_without_cudnn(tmp_path: Path, make_node: MakeNode) -> None:
    with TorchProcess(make_node(devices=1)) as process:
        peaks = process.exec(RECURRENT, folder=str(tmp_path), model=NETWORKS, timeout_seconds=110)
    assert {name: planned for name, (planned, _) in peaks.items()} == {name: real for name, (_, real) in peaks.items()}


@with_the_planners_kernels
def test_a_sharded_plan_is_close_to_fully_shard(tmp_path: Path, make_node: MakeNode) -> None:
    with TorchProcess(make_node(devices=1)) as process:
        planned, real, whole = process.exec(SHARDED, folder=str(tmp_path), model=BLOCKS, timeout_seconds=110)
    assert planned == pytest.approx(real, rel=0.05)
    assert real < 0.9 * whole


@with_the_planners_kernels
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_planned_allocations_are_those_of_the_device(tmp_path: Path, make_node: MakeNode, precision: str) -> None:
    with TorchProcess(make_node(devices=1)) as process:
        branches = process.exec(STEPS, folder=str(tmp_path), model=BRANCHES, precision=precision, timeout_seconds=110)
    allocations, *peaks = branches["planned"]
    real, *real_peaks = branches["real"]
    assert peaks == real_peaks
    # Of autocast's temporaries, some that live for a moment are not planned.
    assert allocations == real or precision == "bf16"
    assert branches["freed parameters"] == 0, "the last step repeats the one before it"


LARGEST = """
import gc
from torch import nn
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.search import Sizing

def encoder():
    layer = nn.TransformerEncoderLayer(256, 8, 1024, batch_first=True)
    return nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

def trains(batch):
    gc.collect()
    torch.cuda.empty_cache()
    try:
        model = encoder().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        for _ in range(10):
            x = torch.zeros(batch, 64, 256).cuda()
            with torch.autocast("cuda", torch.bfloat16):
                out = model(x)
                loss = out.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except torch.OutOfMemoryError:
        return False
    return True

inputs = [parse_tensor("float32[B,64,256]")]
job = Job(encoder, inputs, loss="mean", optimizer="adamw", optimizer_options={"fused": True}, precision="bf16")
free_bytes, _ = torch.cuda.mem_get_info()
batch = Sizing(job).largest(int(0.85 * free_bytes))
result = [batch > 100, trains(batch), trains(batch * 5 // 4)]
"""


@with_the_planners_kernels
def test_the_planned_batch_trains_and_a_quarter_more_does_not(make_node: MakeNode) -> None:
    with TorchProcess(make_node(devices=1, total_bytes=2 << 30)) as process:
        assert process.exec(LARGEST, timeout_seconds=110) == [True, True, False]
