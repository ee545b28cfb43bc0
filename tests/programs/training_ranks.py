"""Two ranks with one device each that accumulate gradients and search for a batch size.

Processes with torch call `run`. The second rank has fewer samples, the first one less memory.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
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


def accumulation_steps_like_one_batch(rank: int, rounding: float) -> None:
    mine = micro_batches(SIZES[rank], seed=rank)
    everyone = [micro_batches(sizes, seed=number) for number, sizes in enumerate(SIZES)]
    windows = [[batch for own in everyone for batch in own[at : at + 2]] for at in range(0, 5, 2)]
    whole = model()
    norms = train_whole(whole, "sgd", windows, CLIP, 2)
    assert min(norms) < CLIP < max(norms), "some steps are clipped and others are not"
    for wrap in (ddp, fsdp):
        net = model()
        wrapped, averaged = wrap(net)
        accumulator = toolkit.GradientAccumulator(
            wrapped,
            optimizer_of("sgd", wrapped),
            effective_batch=16,
            micro_batch=4,
            clip_norm=CLIP,
        )
        # Older releases cannot drop the gradients that FSDP2 keeps.
        if wrap is ddp or hasattr(net, "reset_iter_state"):
            leave_a_window(accumulator, wrapped, mine)
        seen = train_accumulated(accumulator, wrapped, mine, 2)
        assert averaged == [6], "once for each step"
        assert accumulator.steps == 6
        assert difference(net, whole) < rounding, "an abandoned window does not affect the first one"
        assert seen == pytest.approx(norms, rel=rounding)


def leave_a_window(accumulator: toolkit.GradientAccumulator, net: nn.Module, batches: list[Batch]) -> None:
    """The gradient is still local to this rank and must not be in the next window."""
    for x, y in accumulator.batches(batches):
        with accumulator.forward():
            loss = functional.cross_entropy(net(x), y)
        accumulator.backward(loss, samples=len(x))
        break


def misuse_is_refused() -> None:
    net = nn.parallel.DistributedDataParallel(model())
    optimizer = optimizer_of("sgd", net)
    accumulator = toolkit.GradientAccumulator(net, optimizer, effective_batch=24, micro_batch=4)
    with pytest.raises(RuntimeError, match=r"forward\(\).*backward\(\)"):
        train_accumulated(accumulator, net, micro_batches([4, 4]), left_out=(1,))
    with pytest.raises(ConfigurationError, match=r"\b12\b.*\b8\b.*\b4 on 2 ranks\b.*\b8\b.*\b16\b"):
        toolkit.GradientAccumulator(net, optimizer, effective_batch=12, micro_batch=4)


def search(rank: int) -> dict[str, Any]:
    """Return what both ranks must find alike, and what each finds apart."""
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

    if rank == 1:
        with pytest.raises(ValueError, match="no such sample"):
            toolkit.find_batch_size(fails_on_rank_1, start=4096)
    else:
        with pytest.raises(RankFailedError, match=r"\b8192\b.*\brank 1\b") as failed:
            toolkit.find_batch_size(fails_on_rank_1, start=4096)
        assert list(failed.value.ranks) == [1]
    with pytest.raises(ConfigurationError, match=r"\bstart\b.*\b4096 on rank 0\b.*\b4097 on rank 1\b"):
        find(start=4096 + rank)
    with pytest.raises(ConfigurationError, match="process group"):
        find(process_group=alone[1 - rank])
    assert find().size == together.size
    out_of_memory = sorted({number for each in together.tries for number in each.ranks_out_of_memory})
    alike = [together.size, [each.fits for each in together.tries], out_of_memory]
    return {"alike": alike, "together": together.size, "apart": apart.size, "out of memory": out_of_memory}


def run(rank: int, store: str, rounding: float) -> dict[str, Any]:
    """Run one rank. The ranks 0 and 1 find each other by a new file at the path `store`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        accumulation_steps_like_one_batch(rank, rounding)
        misuse_is_refused()
        return search(rank)
    finally:
        dist.destroy_process_group()
