"""The storages of real tensors on the emulated node are named after what holds them, beside the user's code."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess

READ = """
import gc, threading
search_alone = threading.Event()
from bisect import bisect_right
from torch import nn
from gpumem_client.profile.owners import name_storages
from gpumem_client.uninterrupted import Slices

def named_beside(step, **options):
    named = []
    search = threading.Thread(target=lambda: named.append(name_storages(torch, Slices(), **options)))
    search.start()
    while search.is_alive():
        step()
    return named[0]

def owners(step=None, **options):
    named = named_beside(step or (lambda: search_alone.wait(0.01)), gradient_seconds=60 if step else 0, **options)
    blocks = {
        (device, block["address"]): block["size"]
        for device in range(torch.cuda.device_count())
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == device
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    }
    starts, by_block = sorted(blocks), {}
    for place, owner in named.owners.items():
        start = starts[bisect_right(starts, place) - 1]
        if start[0] != place[0] or place[1] >= start[1] + blocks[start]:
            continue  # freed since: steps go on during the search
        by_block.setdefault(start, owner)
    assert sum(blocks.values()) == sum(map(torch.cuda.memory_allocated, range(torch.cuda.device_count())))
    rows = [[*owner, blocks[start], start[0]] for start, owner in by_block.items()]
    return {"rows": rows, "unnamed": sum(blocks.values()) - sum(row[4] for row in rows), "notes": named.notes}
"""

TRAINING = """
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(256, 256) for _ in range(2)])
        self.head = nn.Linear(256, 256, bias=False)
        self.head.weight = self.layers[0].weight
        self.register_buffer("mask", torch.zeros(512, 512))

    def forward(self, batch):
        for layer in self.layers:
            batch = layer(batch).relu()
        return self.head(batch)

class Registered(type):
    def __getattribute__(cls, name):
        if not name.startswith("__init"):
            raise SystemExit("an attribute of a class was read: " + name)
        return super().__getattribute__(name)

    __hash__ = None

class Trainer(metaclass=Registered):
    def __init__(self):
        self.losses = []

    def __getattr__(self, name):
        raise SystemExit("an attribute was read: " + name)

class Wraps(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *arguments, **named):
        raise SystemExit("the program's own code was called")

def train(steps):
    model, trainer = GPT().cuda(), Trainer()
    optimizer = torch.optim.AdamW(model.parameters())
    wrapped = torch.empty(3000, device="cuda").as_subclass(Wraps)
    for _ in range(steps):
        batch = torch.empty(64, 256, device="cuda")
        loss = model(batch).sum()
        loss.backward()
        optimizer.step()
        trainer.losses.append(loss)
    empty, meta, host = torch.empty(0, device="cuda"), torch.empty(9, device="meta"), torch.empty(9)
    return owners(optimizer.step, search_seconds=0)

result = train(steps=5)
gc.collect()
result["left"] = torch.cuda.memory_allocated()
"""


def _names(told: dict[str, Any], kind: str) -> dict[str, int]:
    found: Counter[str] = Counter()
    for row in told["rows"]:
        if row[0] == kind:
            found[row[1]] += row[4]
    return dict(found)


def _reading(start_torch: StartTorch, **environment: str | None) -> TorchProcess:
    process = start_torch(PYTORCH_CUDA_ALLOC_CONF=None, **environment)
    process.exec(READ)
    return process


def test_every_byte_of_a_training_step_is_named_without_running_the_user_s_code(start_torch: StartTorch) -> None:
    told = _reading(start_torch).exec(TRAINING)
    weight, bias = 256 << 10, 1024
    model = {"layers.0.weight": weight, "layers.0.bias": bias, "layers.1.weight": weight, "layers.1.bias": bias}
    assert _names(told, "parameters") == model
    assert _names(told, "gradients") == model
    states = {f"AdamW.{state} {name}": size for name, size in model.items() for state in ("exp_avg", "exp_avg_sq")}
    assert _names(told, "optimizer_state") == states
    assert _names(told, "buffers") == {"mask": 1 << 20}
    others = _names(told, "tensors")
    assert others.pop("list in attribute losses of a Trainer") == 5 * 512
    local = {match[1] for name in others if (match := re.match(r"local variable (\w+) at .* in train$", name))}
    assert local == {"batch", "wrapped"}
    assert [row[2:4] for row in told["rows"] if "batch" in row[1]] == [["64x256", "float32"]]
    assert (told["unnamed"], told["notes"], told["left"]) == (0, [], 0)


FROZEN = """
class Engine:
    def __init__(self):
        self.model = nn.Linear(512, 512).cuda()
        self.caches = [torch.empty(1 << 20, device="cuda") for _ in range(3)]

    def run(self):
        gc.collect()
        gc.freeze()
        frozen = gc.get_freeze_count()
        try:
            return owners(search_seconds=60) | {"stayed": frozen > 0 and gc.get_freeze_count() > 0.99 * frozen}
        finally:
            gc.unfreeze()

result = Engine().run()
"""


def test_a_frozen_heap_is_named_and_stays_frozen(start_torch: StartTorch) -> None:
    told = _reading(start_torch).exec(FROZEN)
    assert told["stayed"]
    assert any("gc.freeze()" in note for note in told["notes"])
    assert _names(told, "parameters") == {"weight": 1 << 20, "bias": 2048}
    assert _names(told, "tensors") == {"list in attribute caches of a Engine": 12 << 20}
    assert told["unnamed"] == 0


WRAPPED = """
import copy
class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64, bias=False)

model = GPT().cuda()
average = copy.deepcopy(model)
parallel = nn.DataParallel(torch.compile(model))
masters = [parameter.detach().clone() for parameter in model.parameters()]
for parameter in masters:
    parameter.grad = torch.ones_like(parameter)
masters[0].main_grad = torch.empty(20000, device="cuda")
optimizer = torch.optim.SGD(masters, momentum=0.9)
optimizer.step()
views = torch.empty(30000, device="cuda").split(15000)
result = owners(optimizer.step)
"""


def test_wrapped_models_copies_and_master_weights_have_names_of_their_own(start_torch: StartTorch) -> None:
    told = _reading(start_torch).exec(WRAPPED)
    master = "SGD.param_groups.0.params.0"
    assert set(_names(told, "parameters")) == {"GPT.linear.weight", "GPT#2.linear.weight", master}
    gradients = _names(told, "gradients")
    assert gradients == {master: 16384 + 80384}
    assert set(_names(told, "optimizer_state")) == {f"SGD.momentum_buffer {master}"}
    (view,) = (row for row in told["rows"] if row[0] == "tensors")
    assert "views" in view[1]
    assert told["unnamed"] == 0


SHARDED = """
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
for module in (*model, model):
    fully_shard(module, mesh=init_device_mesh("cuda", (2,)))
optimizer = torch.optim.AdamW(model.parameters())
model(torch.empty(4, 256, device="cuda")).sum().backward()
result = owners(optimizer.step)
"""


def test_the_shards_of_a_model_have_the_names_of_its_parameters(start_torch: StartTorch) -> None:
    told = _reading(start_torch).exec(SHARDED)
    shards = {"0.weight": 128 << 10, "0.bias": 512, "1.weight": 128 << 10, "1.bias": 512}
    assert _names(told, "parameters") == shards
    assert set(_names(told, "optimizer_state")) == {
        f"AdamW.{state} {name}" for name in shards for state in ("exp_avg", "exp_avg_sq")
    }
    assert set(_names(told, "gradients")) == {"0.weight and 1 more", "1.weight and 1 more"}, "reduced in one buffer"
    assert told["unnamed"] == 0


SWAPPED = """
import time, weakref

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1 << 14, (5 << 30) // (4 << 14), device="cuda")

def profile():
    while not ended:
        searches.append(name_storages(torch, Slices(), gradient_seconds=0.02, search_seconds=10))

ended, searches, survived, swaps, end = False, [], 0, 0, time.monotonic() + 60
thread = threading.Thread(target=profile)
thread.start()
while (len(searches) < 2 or swaps < 20) and time.monotonic() < end:
    net = Net()  # a device has room for one
    seen = weakref.ref(net)
    del net
    swaps += 1
    survived += seen() is not None
ended = True
thread.join()
result = [survived, swaps >= 20, len(searches) > 1]
"""


def test_a_search_keeps_no_model_alive(start_torch: StartTorch) -> None:
    assert _reading(start_torch).exec(SWAPPED, timeout_seconds=110) == [0, True, True]


def test_a_search_copies_no_tensor_that_shares_its_memory(start_torch: StartTorch) -> None:
    process = start_torch()
    code = """
from gpumem_client.objects.tensors import TensorReader
weight = torch.empty(256, 256, device="cuda")
shared = torch._lazy_clone(weight)  # has memory of its own once it is written
before = torch.cuda.memory_allocated()
named = owners()
place = TensorReader(torch).place(shared)
result = [torch.cuda.memory_allocated() - before, torch._C._is_cow_tensor(shared), len(named["rows"]), bool(place)]
"""
    assert process.exec(READ + code) == [0, True, 1, True]
