"""A script with the processes of torch.utils.data and torch.multiprocessing.

A model on the device is fed by DataLoaders whose workers use no CUDA, then two ranks are spawned, which do.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from statement import state, state_and_wait
from torch.utils.data import DataLoader, Dataset


class Numbers(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((256,), float(index))


def forked(worker: int) -> None:
    state("forked")


def spawned(worker: int) -> None:
    state("spawned")


def rank_main(rank: int, world_size: int) -> None:
    store = Path(os.environ["STATEMENTS"]) / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    rows = torch.ones(rank + 1, 1 << 20, device=rank)
    state_and_wait("rank", rank=rank, local_rank=rank, world_size=world_size, rows=len(rows))
    dist.destroy_process_group()


def main() -> None:
    model = torch.nn.Linear(256, 256).cuda()
    loaders = [
        DataLoader(
            Numbers(),
            batch_size=2,
            num_workers=workers,
            multiprocessing_context=method,
            worker_init_fn=initialize,
            pin_memory=True,
            persistent_workers=True,
        )
        for method, workers, initialize in (("fork", 2, forked), ("spawn", 1, spawned))
    ]
    batches = [model(batch.cuda(non_blocking=True)).shape[0] for loader in loaders for batch in loader]
    state_and_wait("trainer", batches=batches)
    del loaders
    state("main")
    mp.spawn(rank_main, args=(2,), nprocs=2)


if __name__ == "__main__":
    main()
