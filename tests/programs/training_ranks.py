"""Two ranks with one device each that search for a batch size.

Processes with torch call `run`. The first rank has less memory.
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import gpumem_toolkit as toolkit
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.errors import RankFailedError
from tests.programs.searched_batches import UNIT, training_step


def accumulation_is_refused() -> None:
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters())
    wrapped = nn.parallel.DistributedDataParallel(net)
    with pytest.raises(ConfigurationError, match=r"\branks\b.*\baccelerate\b"):
        toolkit.GradientAccumulator(wrapped, optimizer, effective_batch=8, micro_batch=4)


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


def run(rank: int, store: str) -> dict[str, Any]:
    """Run one rank. The ranks 0 and 1 find each other by a new file at the path `store`."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        accumulation_is_refused()
        return search(rank)
    finally:
        dist.destroy_process_group()
