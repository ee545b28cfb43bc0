"""Two ranks with one device each that accumulate gradients and search for a batch size.

Processes with torch call `run`. The second rank has fewer samples, the first one less memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.errors import RankFailedError
from tests.programs.accumulated_steps import (
    Batch,
    difference,
    micro_batches,
    model,
    optimizer_of,
    train_accumulated,
    train_whole,
)
from tests.programs.searched_batches import UNIT, training_step

SIZES = ([4, 4, 4, 4, 3], [4, 4, 4, 2, 1])
"""Two micro batches are a window, so the last window and its last batch are short."""
CLIP = 1.0


def ddp(net: nn.Module) -> tuple[nn.Module, list[int]]:
    """Return the wrapped model and a count of the averages of its gradients."""
    wrapped, averaged = nn.parallel.DistributedDataParallel(net), [0]

    def hook(state, bucket):  # type: ignore[no-untyped-def] # DDP rejects annotations that are strings
        averaged[0] += bucket.is_last()
        return allreduce_hook(state, bucket)

    wrapped.register_comm_hook(None, hook)
    return wrapped, averaged


def fsdp(net: nn.Module) -> tuple[nn.Module, list[int]]:
    """Return the sharded model and a count of averaged gradients after a micro batch."""
    mesh, averaged = dist.device_mesh.init_device_mesh("cpu", (2,)), [0]
    for layer in (net[0], net[3], net):
        fully_shard(layer, mesh=mesh)

    def count(parameter: torch.Tensor) -> None:
        averaged[0] += 1

    next(net.parameters()).register_post_accumulate_grad_hook(count)
    return net, averaged


def accumulate(rank: int) -> dict[str, Any]:
    mine = micro_batches(SIZES[rank], seed=rank)
    everyone = [micro_batches(sizes, seed=number) for number, sizes in enumerate(SIZES)]
    windows = [[batch for own in everyone for batch in own[at : at + 2]] for at in range(0, 5, 2)]
    whole = model()
    norms = train_whole(whole, "sgd", windows, CLIP, 2)
    results: dict[str, Any] = {"clipped": [min(norms) < CLIP, max(norms) > CLIP]}
    for name, wrap, every in (("ddp", ddp, False), ("ddp every batch", ddp, True), ("fsdp", fsdp, False)):
        net = model()
        wrapped, averaged = wrap(net)
        accumulator = toolkit.GradientAccumulator(
            wrapped,
            optimizer_of("sgd", wrapped),
            effective_batch=16,
            micro_batch=4,
            clip_norm=CLIP,
            sync_every_batch=every,
        )
        # Older releases cannot drop the gradients that FSDP2 keeps; the accumulator logs a warning.
        if not every and (name == "ddp" or hasattr(net, "reset_iter_state")):
            leave_a_window(accumulator, wrapped, mine)
        seen = train_accumulated(accumulator, wrapped, mine, 2)
        results[name] = {
            "steps": accumulator.steps,
            "averaged": averaged[0],
            "difference": difference(net, whole),
            "norms": max(abs(a / b - 1) for a, b in zip(seen, norms, strict=True)),
        }
    return results


def leave_a_window(accumulator: toolkit.GradientAccumulator, net: nn.Module, batches: list[Batch]) -> None:
    """The gradient is still local to this rank and must not be in the next window."""
    for x, y in accumulator.batches(batches):
        with accumulator.forward():
            loss = functional.cross_entropy(net(x), y)
        accumulator.backward(loss, samples=len(x))
        break


def misuse() -> dict[str, Any]:
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = optimizer_of("sgd", net)
    results: dict[str, Any] = {}
    accumulator = toolkit.GradientAccumulator(net, optimizer, effective_batch=24, micro_batch=4)
    results["left out"] = caught(lambda: train_accumulated(accumulator, net, micro_batches([4, 4]), left_out=(1,)))
    results["uneven"] = caught(
        lambda: toolkit.GradientAccumulator(net, optimizer, effective_batch=12, micro_batch=4),
    )
    return results


def caught(action: Callable[[], Any]) -> list[Any]:
    try:
        action()
    except (ConfigurationError, RankFailedError, RuntimeError, ValueError) as error:
        return [type(error).__name__, str(error), list(getattr(error, "ranks", ()))]
    return []


def search(rank: int) -> dict[str, Any]:
    torch.cuda.set_device(rank)
    step = training_step(f"cuda:{rank}")
    alone = [dist.new_group([number]) for number in range(2)]

    def find(**arguments: Any) -> Any:
        return toolkit.find_batch_size(step, **{"start": 4096, "multiple_of": UNIT, "margin": 0, **arguments})

    together, apart = find(), find(process_group=alone[rank])

    def fails_on_rank_1(size: int) -> None:
        if rank == 1 and size > 4096:
            raise ValueError("no such sample")
        step(size)

    return {
        "together": together.size,
        "apart": apart.size,
        "fits": [each.fits for each in together.tries],
        "out_of_memory": sorted({number for each in together.tries for number in each.ranks_out_of_memory}),
        "failed": caught(lambda: toolkit.find_batch_size(fails_on_rank_1, start=4096)),
        "unlike": caught(lambda: find(start=4096 + rank)),
        "foreign": caught(lambda: find(process_group=alone[1 - rank])),
        "still together": find().size,
    }


def run(rank: int, store: str) -> dict[str, Any]:
    """Run one rank. The ranks 0 and 1 find each other by a new file at the path `store`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        return {"accumulation": accumulate(rank), "misuse": misuse(), "search": search(rank)}
    finally:
        dist.destroy_process_group()
