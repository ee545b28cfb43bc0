"""A script with the Trainer of transformers, which trains on the host before and after it trains on the device."""

from __future__ import annotations

import os
from typing import Any

import torch
from statement import state_and_wait
from transformers import AutoModelForCausalLM, GPT2Config, Trainer, TrainingArguments, set_seed


def train(**arguments: Any) -> tuple[Trainer, list[float]]:
    """Return the trainer and the loss of each step."""
    set_seed(0)
    config = GPT2Config(n_layer=2, n_head=2, n_embd=64, vocab_size=128, n_positions=32)
    tokens = torch.randint(0, config.vocab_size, (16, 32))
    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(config),
        args=TrainingArguments(
            output_dir=os.environ["STATEMENTS"],
            per_device_train_batch_size=4,
            max_steps=4,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            **arguments,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
    )
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def main() -> None:
    _, before = train(use_cpu=True)
    on_device, _ = train()
    _, after = train(use_cpu=True)
    state_and_wait("trainer", losses=[before, after], steps=on_device.state.global_step)


if __name__ == "__main__":
    main()
