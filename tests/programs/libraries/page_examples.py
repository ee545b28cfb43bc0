"""Runs the examples of a section of docs/trainers.md. The functions run in a process with torch."""

from __future__ import annotations

import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers

import gpumem_client
import gpumem_toolkit as toolkit

PAGE = Path(__file__).parents[3] / "docs" / "trainers.md"


class Texts(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.full((8,), index)
        return {"input_ids": tokens, "labels": tokens}


def small_model() -> Any:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "vocab_size": 100, "n_positions": 16}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=1, eos_token_id=1))


def prepared(section: str, folder: str) -> dict[str, Any]:
    """Return what the section's examples take as given."""
    if section == "accelerate":
        from accelerate import Accelerator
        from accelerate.tracking import GeneralTracker

        class Tracker(GeneralTracker):
            name, requires_logging_directory, tracker = "test", False, None

            def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
                logged.update(values)

        logged = set[str]()
        accelerator = Accelerator(log_with=[Tracker()])
        weights = torch.nn.Linear(8, 8, device=accelerator.device)
        given = {"accelerator": accelerator, "loader": range(2), "train_step": lambda _: float(weights.bias.numel())}
        return {**given, "logged": logged}
    if section == "Lightning":
        import lightning

        class Module(lightning.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = small_model()

            def training_step(self, batch: Any, _index: int) -> Any:
                return self.model(**batch).loss

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters())

        loader = torch.utils.data.DataLoader(Texts(), batch_size=2)
        return {"lightning": lightning, "module": Module(), "loader": loader}
    options = {"output_dir": folder, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    more = {"save_strategy": "steps", "save_steps": 2, "eval_on_start": False, "logging_steps": 1, "max_steps": 2}
    arguments = transformers.TrainingArguments(**{**options, **more, "per_device_train_batch_size": 2})
    return {
        "transformers": transformers,
        "model": small_model(),
        "arguments": arguments,
        "data": Texts(),
        "options": options,
    }


class Failing(torch.nn.Module):
    """A model that runs out of memory."""

    def __init__(self) -> None:
        super().__init__()
        self.model = small_model()

    def forward(self, input_ids: Any, labels: Any) -> Any:
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")


def run(section: str) -> dict[str, Any]:
    """Return what the examples logged and measured."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # Lightning writes its logs and checkpoints there
        names = {"toolkit": toolkit, **prepared(section, folder)}
        text = PAGE.read_text().partition(f"\n## {section}")[2].partition("\n## ")[0]
        for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
            exec(compile(code, section, "exec"), names)
        logged = set(names.get("logged", ()))
        found: dict[str, Any] = {"found": int(names["found"])} if "found" in names else {}
        if section.startswith("transformers"):
            trainer = names["trainer"]
            logged = {name for row in trainer.state.log_history for name in row}
            failing = transformers.Trainer(
                Failing(), names["arguments"], train_dataset=Texts(), callbacks=[names["GpuMemCallback"]()]
            )
            before = set(vars(failing))
            try:
                failing.train()
            except torch.OutOfMemoryError as error:
                found["notes"], found["arguments"] = error.__notes__, error.args
            found["left"] = sorted({"log", "evaluate", "_run_epoch", "_save_checkpoint"} & set(vars(failing)) - before)
    phases = sorted(gpumem_client.memory_summary().devices[0].phases)
    return {"logged": sorted(each for each in logged if "/" in each), "phases": phases, **found}
