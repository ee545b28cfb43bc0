"""Jobs for `benchmarks.guest`, which calls `run` in a process with torch.

Each makes steps until its time is over, while another thread measures the longest time that it waits for the GIL.
"""

from __future__ import annotations

import gc
import os
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import gpumem_client

Step = Callable[[], object]


START_SECONDS = 300.0
"""The longest time for the start of a job."""


def _add_one(parameter: Any) -> None:
    parameter.grad.add_(1)


class Ticks:
    """A thread that measures the longest time between two of its turns, if the process used a processor in it."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tick, daemon=True)
        self._thread.start()

    def _tick(self) -> None:
        last, used = time.perf_counter(), time.process_time()
        while not self._ended.wait(0.001):
            now, used_now = time.perf_counter(), time.process_time()
            # The holder of the GIL uses a processor. Without use, the process waited for a processor.
            self.longest_seconds = max(self.longest_seconds, min(now - last, used_now - used))
            last, used = now, used_now

    def end(self) -> float:
        """End the thread and return the longest time in seconds."""
        self._ended.set()
        self._thread.join()
        return self.longest_seconds


class Collections:
    """Measures each full garbage collection of the process; some are made at the start and at the end."""

    def __init__(self) -> None:
        self._started = 0.0
        self._longest_seconds = 0.0
        gc.callbacks.append(self._note)
        self._make()

    def _make(self) -> None:
        for _ in range(3):
            gc.collect()

    def _note(self, phase: str, info: dict[str, int]) -> None:
        if info["generation"] == 2:
            now = time.thread_time()
            if phase == "start":
                self._started = now
            else:
                self._longest_seconds = max(self._longest_seconds, now - self._started)

    def end(self) -> float:
        """Return the longest time in seconds, as a gap is the longest of many."""
        self._make()
        gc.callbacks.remove(self._note)
        return self._longest_seconds


def network(width: int = 64, layers: int = 8) -> nn.Sequential:
    """Return a small model."""
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)]).cuda()


def batch(width: int = 64) -> torch.Tensor:
    """Return a batch for the model."""
    return torch.empty(16, width, device="cuda")


def trained(model: Any, forward: Callable[[], Any] | None = None, **options: Any) -> Step:
    """Return a training step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step() -> None:
        (forward() if forward else model(batch())).sum().backward(**options)
        optimizer.step()
        optimizer.zero_grad()

    return step


def plain() -> Step:
    """Many small objects beside a plain model, as a script that has imported its libraries."""
    model = network()
    model.kept = [{"values": [number]} for number in range(100_000)]  # type: ignore[assignment]
    return trained(model)


def of_parameters(parameters: list[Any]) -> Step:
    """Train parameters without a module."""
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step() -> None:
        sum(each.sum() for each in parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def wrapped() -> Step:
    """Parameters of a class with `__torch_dispatch__`."""
    from torch.testing._internal.two_tensor import TwoTensor

    return of_parameters([nn.Parameter(TwoTensor(batch(), batch())) for _ in range(60)])


def hooked_subclass() -> Step:
    """Parameters of a subclass, with hooks on their gradients."""

    class Hooked(torch.Tensor):
        pass

    parameters = [nn.Parameter(batch().as_subclass(Hooked)) for _ in range(60)]
    for each in parameters:
        each.register_hook(lambda gradient: gradient.clone())
        each.register_post_accumulate_grad_hook(_add_one)
    return of_parameters(parameters)


def sparse() -> Step:
    """Sparse gradients."""
    tables = nn.ModuleList(nn.Embedding(100, 16, sparse=True) for _ in range(8)).cuda()
    places = torch.zeros(32, dtype=torch.long, device="cuda")

    def step() -> None:
        sum(table(places).sum() for table in tables).backward()
        for table in tables:
            table.weight.grad = None

    return step


def dtensor() -> Step:
    """DTensor parameters, as tensor parallelism has them, on one rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    return of_parameters([nn.Parameter(distribute_tensor(batch(), mesh, [Replicate()])) for _ in range(60)])


def _group() -> None:
    import torch.distributed as dist

    rank, store = int(os.environ["RANK"]), os.environ["GUEST_STORE"]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)


def ddp() -> Step:
    """DDP on two ranks over gloo."""
    _group()
    return _together(trained(nn.parallel.DistributedDataParallel(network(), device_ids=[0])))


def fsdp() -> Step:
    """FSDP2 on two ranks over gloo."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard

    _group()
    model = network()
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cuda")
    for layer in (*model, model):
        fully_shard(layer, mesh=mesh)
    return _together(trained(model))


def _together(step: Step) -> Step:
    """Return a step after which all ranks agree to go on: none may wait for one that has ended."""
    import torch.distributed as dist

    go_on = torch.ones(1)

    def agreed() -> bool:
        step()
        go_on.fill_(time.monotonic() < _end)
        dist.all_reduce(go_on, dist.ReduceOp.MIN)
        return bool(go_on)

    return agreed


def checkpointed() -> Step:
    """Activation checkpointing, in both forms."""
    model = network()

    def forward() -> Any:
        x = batch().requires_grad_()
        for number, layer in enumerate(model):
            x = checkpoint(layer, x, use_reentrant=number % 2 == 0)
        return x

    return trained(model, forward)


def hooks() -> Step:
    """Hooks on modules and on saved tensors."""
    model, seen = network(), []
    for layer in model:
        layer.register_forward_hook(lambda _module, _given, result: seen.append(weakref.ref(result)))
        layer.register_full_backward_hook(lambda _module, _given, _result: seen.clear())

    def forward() -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            return model(batch())

    return trained(model, forward)


def compiled_autograd() -> Step:
    """Compiled autograd, with a compiler that only runs the graph."""
    step = trained(network(layers=2))

    def compiled() -> None:
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph):
            step()

    return compiled


def retained() -> Step:
    """`retain_graph`, and gradients of gradients."""
    model = network()
    parameters = list(model.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.1)

    def step() -> None:
        loss = model(batch()).pow(2).sum()
        loss.backward(retain_graph=True)
        gradients = torch.autograd.grad(loss, parameters, create_graph=True)
        sum(each.pow(2).sum() for each in gradients).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def cleared_gradients() -> Step:
    """Another thread sets gradients to None between two steps."""
    # Beside a backward pass or a step, torch itself crashes.
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    stepped, cleared = threading.Semaphore(0), threading.Semaphore(0)

    def clear() -> None:
        while stepped.acquire() and not _ending.is_set():
            for each in model.parameters():
                each.grad = None
            cleared.release()

    def step() -> None:
        model(batch()).sum().backward()
        optimizer.step()
        stepped.release()
        cleared.acquire()

    _beside.append((threading.Thread(target=clear), stepped.release))
    _beside[0][0].start()
    return step


class _Numbers(torch.utils.data.Dataset):  # type: ignore[type-arg]
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(64) * index


def loaded() -> Step:
    """Workers of a DataLoader start and end during profiles."""
    model = network()
    loader = torch.utils.data.DataLoader(_Numbers(), batch_size=16, num_workers=2)
    steps = trained(model)

    def step() -> None:
        for each in loader:
            each.cuda()
            steps()

    return step


def swapped() -> Step:
    """Models replace each other on a device that has room for one."""
    rows = int(0.6 * torch.cuda.mem_get_info()[1]) // (4 << 14)

    def step() -> None:
        model = nn.Linear(1 << 14, rows, bias=False, device="cuda")
        model.kept = [torch.empty(100, device="cuda")]  # type: ignore[assignment]
        seen = weakref.ref(model)
        del model
        if seen() is not None:
            raise AssertionError("the model outlives its last reference")

    return step


def out_of_memory() -> Step:
    """Runs out of memory and goes on."""
    step = trained(network())
    rows = int(0.6 * torch.cuda.mem_get_info()[1])

    def failing() -> None:
        step()
        kept = []
        try:
            kept = [torch.empty(rows, dtype=torch.uint8, device="cuda") for _ in range(2)]
        except torch.OutOfMemoryError:
            time.sleep(0.2)
        else:
            raise AssertionError(f"the device has room for {len(kept)}")

    return failing


KINDS: dict[str, Callable[[], Step]] = {
    each.__name__: each
    for each in (
        *(plain, wrapped, hooked_subclass, sparse, dtensor, ddp, fsdp, checkpointed, hooks, compiled_autograd),
        *(retained, cleared_gradients, loaded, swapped, out_of_memory),
    )
}
_end = 0.0
_ending = threading.Event()
_beside: list[tuple[threading.Thread, Callable[[], None]]] = []


def run(kind: str, seconds: float, *, start_client: bool = True) -> dict[str, float]:
    """Run a job of a kind: a fifth of the time without the client, then with it. Returns what it saw."""
    global _end
    torch.set_num_threads(1)
    torch.empty(1, device="cuda")
    _end = time.monotonic() + START_SECONDS
    step = KINDS[kind]()
    step()
    seen = {f"{name}_alone": value for name, value in _steps(step, seconds / 5).items()}
    collections = Collections()
    if start_client:
        gpumem_client.start()
    try:
        return {**seen, **_steps(step, seconds), "collection": collections.end()}
    finally:
        _ending.set()
        for thread, wake in _beside:
            wake()
            thread.join()


def _steps(step: Step, seconds: float) -> dict[str, float]:
    global _end
    _end = time.monotonic() + seconds
    steps, ooms, ticks, goes_on = 0, 0, Ticks(), True
    while goes_on:
        try:
            # Ranks agree on the end; other jobs look at the time.
            agreed = step()
            goes_on = agreed if isinstance(agreed, bool) else time.monotonic() < _end
        except torch.OutOfMemoryError:
            ooms += 1
        steps += 1
    return {"steps": steps, "ooms": ooms, "gap": ticks.end()}
