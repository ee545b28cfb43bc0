"""Cleaning with real torch on the emulated node: the freed bytes equal those that the driver regains."""

from __future__ import annotations

import pickle
from pathlib import Path

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import EmulatedNode

MIB = 1 << 20


def test_each_way_of_cleaning_frees_the_bytes_that_it_returns(node: EmulatedNode, start_torch: StartTorch) -> None:
    process = start_torch(PYTORCH_CUDA_ALLOC_CONF=None)
    process.exec("import gc\nimport gpumem_client as client\nimport gpumem_toolkit as toolkit\ngc.disable()")

    def free() -> int:
        return node.books()[0].free_bytes

    process.call("random_heap", device=0, seed=5)
    before = free()
    freed = process.exec("result = client.clear_cache()")
    assert freed == free() - before > 0
    assert process.exec("result = client.clear_cache(synchronize=True)") == 0

    process.call("free")
    process.exec("client.clear_cache()")
    process.exec(
        "class Cycle: pass\n"
        "cycle = Cycle(); cycle.me = cycle\n"
        f"cycle.tensor = torch.empty({32 * MIB}, dtype=torch.uint8, device='cuda')\n"
        "del cycle\n"
    )
    assert process.exec("result = client.clear_cache()") == 0
    before = free()
    assert process.exec("result = client.clear_cache(collect_garbage=True)") == 32 * MIB == free() - before

    rungs = process.exec(
        "cycle = Cycle(); cycle.me = cycle\n"
        f"cycle.tensor = torch.empty({64 * MIB}, dtype=torch.uint8, device='cuda')\n"
        f"pinned = torch.empty({8 * MIB}, dtype=torch.uint8).pin_memory()\n"
        "del cycle, pinned\n"
        "done = toolkit.deep_clean()\n"
        "result = {rung.name: [rung.freed_bytes, rung.reason] for rung in done.rungs} | {'freed': done.freed_bytes}\n"
    )
    assert rungs["garbage"] == rungs["cache"] == [64 * MIB, ""]
    assert rungs["pinned_host_cache"] == [8 * MIB, ""]
    assert rungs["freed"] == 64 * MIB
    assert set(rungs) == {"garbage", "ipc_handles", "cublas_workspaces", "cache", "pinned_host_cache", "freed"}


RELEASED = """
import collections
import gpumem_client as client
import gpumem_toolkit as toolkit
result = {}
model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.BatchNorm1d(2048)).to("cuda")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.empty(8, 2048, device="cuda")).sum().backward()
optimizer.step()
average, weight = model[0].weight.detach().clone(), model[0].weight.detach()
held = torch.cuda.memory_reserved()
result["freed"] = toolkit.release_model(model, optimizer)
result["fallen"] = held - torch.cuda.memory_reserved()
torch._C._cuda_clearCublasWorkspaces()  # the allocator counts them
result["left"], result["others"] = torch.cuda.memory_allocated(), average.nbytes + weight.nbytes
del average, weight

Pair = collections.namedtuple("Pair", "x y")
leaf = torch.empty(4, device="cuda", requires_grad=True)
tree = {"a": [leaf, leaf * 2], "p": Pair(leaf, "text"), "o": collections.OrderedDict(k=leaf), "n": None}
copied = toolkit.to_cpu(tree)
result["types"] = [type(copied["p"]).__name__, type(copied["o"]).__name__]
result["same"] = copied["a"][0] is copied["p"].x is copied["o"]["k"]
del leaf, tree
result["graph"], result["none"] = copied["a"][1].requires_grad, copied["n"]
result["allocated"] = torch.cuda.memory_allocated()

torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
client.reset_peak()
result["peak"] = torch.cuda.max_memory_allocated()
client.set_memory_fraction(0.25)
try:
    torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
except torch.OutOfMemoryError:
    result["refused"] = True
client.set_memory_fraction(1.0)
torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
result["path"] = str(client.snapshot(given))
"""


def test_release_model_to_cpu_reset_peak_set_memory_fraction_and_snapshot(
    start_torch: StartTorch, tmp_path: Path
) -> None:
    path = tmp_path / "snapshot.pickle"
    result = start_torch(PYTORCH_CUDA_ALLOC_CONF=None).exec(RELEASED, given=str(path))
    assert result["freed"] == result["fallen"] > 0
    assert result["left"] == result["others"], "tensors made from the weights keep their memory"
    assert result["types"] == ["Pair", "OrderedDict"]
    assert result["same"], "a tensor that occurs twice in a tree is copied once"
    assert (result["graph"], result["none"], result["allocated"]) == (False, None, 0)
    assert (result["peak"], result["refused"], result["path"]) == (0, True, str(path))
    assert pickle.loads(path.read_bytes())["segments"]
    assert [each.name for each in tmp_path.iterdir() if each.name.startswith(".snapshot")] == []


CLEANED = """
import gpumem_client as client
import gpumem_toolkit as toolkit
MIB = 1 << 20
def tensor(mebibytes):
    return torch.empty(mebibytes * MIB, dtype=torch.uint8, device="cuda")
large = [tensor(100) for _ in range(4)]
del large
kept = [(tensor(12), tensor(80)) for _ in range(4)]
kept = [small for small, _ in kept]
tensor(300)
cleaner = toolkit.auto_clean(0.3, min_bytes=100 * MIB, cooldown_steps=5)
reserved = torch.cuda.memory_reserved()
for _ in range(3):
    client.step()
cleaner.stop()
result = [cleaner.clears, cleaner.freed_bytes, reserved - torch.cuda.memory_reserved()]
"""


def test_a_fragmented_heap_is_cleared_at_the_end_of_a_step(start_torch: StartTorch) -> None:
    clears, freed, fallen = start_torch(PYTORCH_CUDA_ALLOC_CONF=None).exec(CLEANED)
    assert clears == 1
    assert freed == fallen >= 300 << 20
