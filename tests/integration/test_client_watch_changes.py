"""A count that relies on an earlier one is as one from scratch, whatever has been done to the tensors between."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.emulation.node import EmulatedNode
from tests.emulation.torch_process import TorchProcess

TRAINING = """
import contextlib, gc, random
from gpumem_exporter import client as gpumem
from gpumem_exporter.client.measure import portions
from gpumem_exporter.client.measure import model_structure

class Measured:
    \"\"\"Counts what is measured, and found, anew.\"\"\"
    def __enter__(self):
        self.portions = self.structures = 0
        self.kept = portions.Portion.__init__, model_structure.Structure.find
        def init(portion, *arguments):
            self.portions += 1
            self.kept[0](portion, *arguments)
        def find(structure):
            self.structures += 1
            return self.kept[1](structure)
        portions.Portion.__init__, model_structure.Structure.find = init, find
        return self
    def __exit__(self, *_):
        portions.Portion.__init__, model_structure.Structure.find = self.kept

def make(layers=6):
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(layers))).cuda()
    return model, torch.optim.AdamW(model.parameters(), foreach=False)

def train(model, optimizer):
    model(torch.randn(4, 64, device="cuda")).sum().backward()
    optimizer.step()

def from_scratch(model, optimizer):
    with gpumem.watch(model, optimizer) as watching:
        return watching.look()
"""


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[TorchProcess]:
    """A process on a node of its own; its tests leave nothing behind but names that each sets anew."""
    node = EmulatedNode(tmp_path_factory.mktemp("node") / "node")
    with contextlib.closing(node), TorchProcess(node) as process:
        process.exec(TRAINING)
        yield process


def test_while_nothing_changes_nothing_is_measured_twice_though_gradients_come_and_go(process: TorchProcess) -> None:
    measured, same, gradients = process.exec(
        """
model, optimizer = make()
watching = gpumem.watch(model, optimizer)
train(model, optimizer)
first = watching.look()
same, gradients = [], []
with Measured() as measured:
    for round in range(6):
        optimizer.zero_grad()
        if round % 2:
            train(model, optimizer)
        kept = torch.empty(1 << round, device="cuda")
        gradients.append(watching.look()[0].gradients)
        same.append(watching.latest[0].parameters == first[0].parameters and watching.latest[1] == first[1])
result = [measured.portions, measured.structures], same, gradients
watching.close()
"""
    )
    assert measured == [0, 0]
    assert same == [True] * 6
    assert gradients == [0, 6 * (64 * 64 + 64) * 4] * 3


CHANGES = {
    "a parameter's data is a smaller copy": "weight.data = weight.data[:8].clone()",
    "a parameter's data is larger, and the old one is kept": "weight.data = torch.empty(128, 64, device='cuda')",
    "a parameter's data is a part of something larger": "weight.data = torch.empty(999, 64, device='cuda')[:64]",
    "a parameter is offloaded, and a copy on the device is kept": "weight.data = weight.data.cpu()",
    "all is of half precision": "model.half()",
    "two parameters are tied by their data": "weight.data = model[1].weight.data",
    "two parameters are tied": (
        "model[1].weight = weight; optimizer.param_groups[0]['params'] = list(model.parameters())"
    ),
    "a parameter is replaced, and the optimizer keeps it": (
        "model[0].weight = torch.nn.Parameter(weight.detach().clone())"
    ),
    "PyTorch swaps a parameter, which must have no weak reference": (
        "torch.utils.swap_tensors(weight, torch.nn.Parameter(torch.empty(8, 64, device='cuda')))"
    ),
    "a parameter is written into the module's dictionary": (
        "model[0]._parameters['extra'] = torch.nn.Parameter(torch.empty(5, device='cuda'))"
    ),
    "a module's dictionary is another one": (
        "model[0]._parameters = {'weight': model[1].weight}; optimizer.param_groups[0]['params'] = []"
    ),
    "a module is added to a leaf": "model[0].adapter = torch.nn.Linear(64, 2).cuda()",
    "a module goes": "del model[5]; optimizer.param_groups[0]['params'] = []",
    "a module takes another's place": "model[0] = torch.nn.Linear(64, 32).cuda()",
    "parameters are added to the optimizer": "optimizer.add_param_group({'params': [torch.empty(7, device='cuda')]})",
    "one is appended to a group": "optimizer.param_groups[0]['params'].append(torch.empty(7, device='cuda'))",
    "the storage of a parameter is freed": "weight.untyped_storage().resize_(0)",
    "a storage is freed, and grown where it was": (
        "storage = weight.untyped_storage(); storage.resize_(0); storage.resize_(64 * 64 * 4 + 100)"
    ),
    "the storage of a state is freed": "state['exp_avg'].untyped_storage().resize_(0)",
    "a state's data is in the host's memory": "state['exp_avg'].data = state['exp_avg'].cpu()",
    "a state is offloaded": "state['exp_avg'] = state['exp_avg'].cpu()",
    "a state is another one": "state['exp_avg'] = torch.empty(3, device='cuda')",
    "a state is no tensor any more": "state['exp_avg'] = None",
    "a state is in a list": "state['exp_avg'] = [state['exp_avg'], torch.empty(3, device='cuda')]",
    "a state more": "state['more'] = torch.empty(3, device='cuda')",
    "a state is the parameter itself": "state['exp_avg'] = weight",
    "no states": "optimizer.state.clear()",
    "states are loaded from others": "optimizer.load_state_dict(other.state_dict())",
    "the states' dictionary is another one": "optimizer.state = {weight: {'exp_avg': torch.empty(3, device='cuda')}}",
    "a gradient goes": "weight.grad = None",
    "gradients go, and parameters are frozen": "model.requires_grad_(False); optimizer.zero_grad()",
    "a gradient shows one element many times": "weight.grad = torch.ones((), device='cuda').expand(64, 64)",
    "a gradient is sparse": "weight.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], (64, 64), device='cuda')",
    "a gradient's storage is freed": "weight.grad.untyped_storage().resize_(0)",
    "a gradient is in the host's memory": "weight.grad.data = weight.grad.cpu()",
    "a gradient is a part of itself": "weight.grad.data = weight.grad[:2]",
}


@pytest.mark.parametrize("change", CHANGES)
def test_after_a_change_a_count_is_what_it_would_be_from_scratch(process: TorchProcess, change: str) -> None:
    before, after, scratch = process.exec(
        f"""
model, optimizer = make()
train(model, optimizer)
_, other = make()
other.param_groups[0]["params"] = list(model.parameters())
for parameter in model.parameters():
    other.state[parameter] = {{"step": torch.ones(()), "exp_avg": torch.empty(9, device="cuda")}}
with gpumem.watch(model, optimizer) as watching:
    watching.look()
    weight = model[0].weight
    state = optimizer.state[weight]
    kept = [weight.data, weight.grad.data, *(value.data for value in state.values())]
    before = [repr(each) for each in watching.look()]
    {CHANGES[change]}
    result = before, [repr(each) for each in watching.look()], [repr(each) for each in from_scratch(model, optimizer)]
"""
    )
    assert after == scratch
    assert after != before


def test_a_thousand_changes_at_random_leave_no_count_wrong(process: TorchProcess) -> None:
    wrong = process.exec(
        """
def shuffle(seed, steps=250):
    chance = random.Random(seed)
    model, optimizer = make()
    train(model, optimizer)
    kept, wrong = [], []
    def weight():
        return chance.choice(list(model.parameters()))
    def state():
        return chance.choice(list(optimizer.state.values()) or [{}])
    def tensor(like):
        made = torch.empty(like.shape if chance.random() < 0.7 else (chance.randrange(1, 9) * 64, 64), device="cuda")
        return chance.choice([made, made.cpu(), made.half(), like.detach(), made.flatten()[: (made.numel() + 1) // 2]])
    def data():
        p = weight()
        kept.append(p.data)
        p.data = tensor(p)
    def drop():
        kept.clear()
    def keep():
        kept.append(torch.empty(chance.randrange(1, 5000), device="cuda"))
    def resize():
        storage = weight().untyped_storage()
        for size in (0, chance.randrange(0, 40000)):
            storage.resize_(size)
    def gradient():
        p = weight()
        full = torch.empty_like(p)
        p.grad = chance.choice([None, full, full.flatten()[:1].expand(p.numel()).view_as(p)])
    def swap():
        one, two = weight(), weight()
        one.data, two.data = two.data, one.data
    def states():
        inside = state()
        for name in list(inside):
            new = tensor(torch.empty(64, 64))
            inside[name] = chance.choice([inside[name], new, 1.0, [torch.empty(3, device="cuda")]])
    def state_data():
        for value in state().values():
            if isinstance(value, torch.Tensor):
                kept.append(value.data)
                value.data = tensor(value)
    def replace():
        layer = chance.choice(list(model))
        layer.weight = chance.choice([torch.nn.Parameter(tensor(layer.weight).float()), model[0].weight])
    def layers():
        if chance.random() < 0.5 and len(model) > 2:
            del model[chance.randrange(len(model))]
        else:
            model.append(chance.choice([torch.nn.Linear(8, 8).cuda(), model[0]]))
    def groups():
        found = optimizer.param_groups[0]["params"]
        if chance.random() < 0.5 and found:
            optimizer.state.pop(found.pop(chance.randrange(len(found))), None)
        else:
            found.append(torch.nn.Parameter(torch.empty(chance.randrange(1, 99), device="cuda")))
    changes = [data, drop, keep, resize, gradient, swap, states, state_data, replace, layers, groups, lambda: None]
    with gpumem.watch(model, optimizer) as watching:
        for step in range(steps):
            change = chance.choice(changes)
            with contextlib.suppress(RuntimeError):
                change()
            if watching.look() != from_scratch(model, optimizer):
                wrong.append((seed, step, change.__name__))
    return wrong
result = [found for seed in range(4) for found in shuffle(seed)]
""",
        timeout_seconds=110,
    )
    assert wrong == []
