"""The training loop of accelerate's documentation, with gloo instead of NCCL."""

from __future__ import annotations

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from statement import state_and_wait
from torch.utils.data import DataLoader, TensorDataset


def main() -> None:
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(backend="gloo")])
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(TensorDataset(torch.randn(16, 256)), batch_size=4)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for (batch,) in loader:
        optimizer.zero_grad()
        accelerator.backward(model(batch).sum())
        optimizer.step()
    state_and_wait(
        "rank",
        rank=accelerator.process_index,
        local_rank=accelerator.local_process_index,
        world_size=accelerator.num_processes,
    )
    accelerator.end_training()


if __name__ == "__main__":
    main()
