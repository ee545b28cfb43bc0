"""A script with Lightning's Trainer, which starts its second rank itself; gloo instead of NCCL.

It trains on the host before and after it trains on the devices.
"""

from __future__ import annotations

from typing import Any

import lightning
import torch
from lightning.pytorch.strategies import DDPStrategy
from statement import state_and_wait
from torch.utils.data import DataLoader, TensorDataset


class Autoencoder(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.Dropout(), torch.nn.Linear(64, 256))
        self.losses: list[float] = []

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        loss = torch.nn.functional.mse_loss(self.layers(batch[0]), batch[0])
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters())


def train(**arguments: Any) -> tuple[lightning.Trainer, Autoencoder]:
    lightning.seed_everything(0, verbose=False)
    model = Autoencoder()
    trainer = lightning.Trainer(
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **arguments,
    )
    trainer.fit(model, DataLoader(TensorDataset(torch.randn(32, 256)), batch_size=4))
    return trainer, model


def main() -> None:
    before = train(accelerator="cpu", devices=1)[1].losses
    trainer, model = train(accelerator="gpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"))
    model.to(trainer.strategy.root_device)
    after = train(accelerator="cpu", devices=1)[1].losses
    state_and_wait(
        "rank",
        rank=trainer.global_rank,
        local_rank=trainer.local_rank,
        world_size=trainer.world_size,
        losses=[before, after],
    )


if __name__ == "__main__":
    main()
