"""Parameters, gradients and optimizer state of real PyTorch processes on the emulated node."""

from __future__ import annotations

import pytest

from tests.emulation.torch_process import TorchProcess
from tests.support.processes.observed_training import PARAMETERS_BYTES as PARAMETERS
from tests.support.processes.observed_training import process_of_the_module, shared_process

__all__ = ["process_of_the_module", "shared_process"]


def test_components_are_as_calculated_at_a_step_and_afterwards(shared_process: TorchProcess) -> None:
    at_step, after, allocated, host = shared_process.exec(
        """
model, optimizer = make()
with toolkit.watch(model, optimizer) as watching:
    step(model, optimizer)
    at_step = watching.latest
    allocated = torch.cuda.memory_allocated(0)
    after = watching.look()
fields = ("index", "parameters", "gradients", "optimizer_state", "other")
result = [[getattr(each[0], name) for name in fields] for each in (at_step, after)]
result += [allocated, at_step[1].optimizer_state]
"""
    )
    assert at_step[:4] == [0, PARAMETERS, PARAMETERS, 2 * PARAMETERS]
    assert after == [0, PARAMETERS, 0, 2 * PARAMETERS, allocated - 3 * PARAMETERS]
    assert host == 4 * 2 * 4  # a counter of steps for each parameter, on the host


CASES = {
    "tied weights, as two parameters on one storage": (
        """
model = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False), torch.nn.Linear(64, 64, bias=False)]).cuda()
model[1].weight = torch.nn.Parameter(model[0].weight.detach().t())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
""",
        (64 * 64 * 4, 0, 0),
    ),
    "states in 8 bits with a table that all share": (
        """
class Eight(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
        self.table = torch.empty(256, device="cuda")
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p] = {"step": 1, "state1": torch.empty_like(p, dtype=torch.uint8), "qmap1": self.table,
                                 "nested": [{"absmax1": torch.empty(4, device="cuda")}]}
model = torch.nn.ModuleList([torch.nn.Linear(64, 64, bias=False) for _ in range(3)]).cuda()
optimizer = Eight(model.parameters())
""",
        (3 * 4096 * 4, 0, 3 * (4096 + 16) + 1024),
    ),
    "sparse gradients": (
        """
model = torch.nn.Embedding(100, 64, sparse=True).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
values = torch.empty(3, 64, device="cuda")
model.weight.grad = torch.sparse_coo_tensor(torch.tensor([[1, 2, 5]], device="cuda"), values, (100, 64))
""",
        (6400 * 4, 3 * 8 + 3 * 64 * 4, 0),
    ),
    "a parameter without a shape yet, one on no device, and one whose storage was freed": (
        """
model = torch.nn.ModuleList([torch.nn.LazyLinear(4), torch.nn.Linear(8, 8, device="meta"), torch.nn.Linear(64, 64)])
model[2].cuda()
model[2].weight.untyped_storage().resize_(0)
optimizer = None
""",
        (64 * 4, 0, 0),
    ),
    "a wrapped optimizer and copies in full precision beside the model": (
        """
model = torch.nn.Linear(64, 64, bias=False).cuda().half()
copies = [p.detach().clone().float().requires_grad_() for p in model.parameters()]
inner = torch.optim.SGD(copies, lr=0.1)
optimizer = type("Wrapped", (), {"optimizer": inner})()
""",
        (4096 * 2 + 4096 * 4, 0, 0),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_each_storage_counts_once(shared_process: TorchProcess, case: str) -> None:
    setting, expected = CASES[case]
    reply = shared_process.exec(
        setting
        + """
if hasattr(optimizer, "step"):
    optimizer.step()
with toolkit.watch(model, optimizer) as watching:
    counted = {each.index: each for each in watching.look()}
result = [getattr(counted[0], name) for name in ("parameters", "gradients", "optimizer_state")]
"""
    )
    assert tuple(reply) == expected


def test_components_of_sharded_and_replicated_models(shared_process: TorchProcess) -> None:
    reply = shared_process.exec(
        """
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

result = {}
def count(name, model):
    optimizer = torch.optim.AdamW(model.parameters())
    with toolkit.watch(model, optimizer) as watching:
        model(torch.randn(8, 256, device="cuda")).sum().backward()
        optimizer.step()
        counted = watching.latest[0]
        again = watching.look()[0]
        assert (again.parameters, again.optimizer_state) == (counted.parameters, counted.optimizer_state)
    result[name] = [counted.parameters, counted.gradients, counted.optimizer_state, counted.other]

torch.cuda.set_device(0)
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
model, _ = make()
mesh = init_device_mesh("cuda", (4,))
for layer in model:
    if isinstance(layer, torch.nn.Linear):
        fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)
count("fsdp2", model)
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
for views in (False, True):
    model, _ = make()
    count(f"ddp {views}", DistributedDataParallel(model, device_ids=[0], gradient_as_bucket_view=views))
dist.destroy_process_group()
""",
        timeout_seconds=110,
    )
    assert reply["fsdp2"][:3] == [PARAMETERS / 4, PARAMETERS / 4, PARAMETERS / 2]
    assert reply["ddp True"][:3] == reply["ddp False"][:3] == [PARAMETERS, PARAMETERS, 2 * PARAMETERS]
    assert reply["ddp False"][3] - reply["ddp True"][3] == PARAMETERS  # the buckets beside the gradients


def test_a_count_keeps_its_interval_and_lets_pytorch_swap_parameters(shared_process: TorchProcess) -> None:
    gradients, counted_again = shared_process.exec(
        """
model, optimizer = make()
watching = toolkit.watch(model, optimizer)
def one():
    step(model, optimizer)
    gpumem.step()  # a step that is also marked, when no gradient is left
    torch.utils.swap_tensors(model[0].weight, torch.nn.Parameter(model[0].weight.detach().clone()))
one()
first = watching.latest
for _ in range(3):
    one()
result = first[0].gradients, watching.latest is not first
watching.close()
"""
    )
    assert (gradients, counted_again) == (PARAMETERS, False)


def test_a_model_or_optimizer_of_two_watches_counts_once(shared_process: TorchProcess) -> None:
    """A notebook cell may run again, and a library may watch the same model."""
    reply = shared_process.exec(
        """
from gpumem_client.phases.observed import process_observed
def components():
    return dict(process_observed().components(0))
model, optimizer = make()
watching = [toolkit.watch(model, optimizer)]
step(model, optimizer)
watching[0].look()
result = [components()]
for again in ((model, optimizer), (torch.nn.DataParallel(model, [0]), optimizer), (model, None), (None, optimizer)):
    watching.append(toolkit.watch(*again))
    watching[-1].look()
    result.append(components())
another = make()
other = toolkit.watch(*another)
(parameters,) = {each.parameters for each in other.look() if each.index == 0}
result.append(components()["parameters"] - parameters)
for each in (*watching, other):
    each.close()
"""
    )
    alone, *with_others, beside_another = reply
    assert alone["parameters"] > 0
    assert alone["optimizer_state"] > 0
    assert with_others == [alone] * 4
    assert beside_another == alone["parameters"]


def test_the_gradient_of_a_parameter_that_is_not_a_leaf_is_not_read(shared_process: TorchProcess) -> None:
    assert shared_process.exec(
        """
import warnings
model = torch.nn.Linear(16, 16, bias=False).cuda()
with toolkit.watch(model) as watching, warnings.catch_warnings():
    warnings.simplefilter("error")
    watching.look()
    model.weight.requires_grad_(False).mul_(torch.ones(16, 16, device="cuda", requires_grad=True))
    result = [watching.look()[0].parameters, watching.look()[0].gradients]
"""
    ) == [16 * 16 * 4, 0]


def test_a_compiled_step_is_counted_without_a_warning_of_torch_compile(
    shared_process: TorchProcess,
) -> None:
    parameters, warned = shared_process.exec(
        """
import warnings
model, optimizer = make()
model.requires_grad_(False)
for parameter in model.parameters():
    parameter.grad = torch.zeros_like(parameter)
compiled = torch.compile(optimizer.step, backend="eager")
with toolkit.watch(model, optimizer) as watching, warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    for _ in range(3):
        compiled()
    result = watching.latest[0].parameters, [str(each.message) for each in warned if "trace" in str(each.message)]
"""
    )
    assert (parameters, warned) == (PARAMETERS, [])
