"""Compares plans of configs and LightningModules with the real peaks of transformers' and Lightning's trainers.

    python -m benchmarks.planner_trainers [--json] [--only JOB ...]

Needs transformers, accelerate and lightning. The models are small and random, and nothing is downloaded. Each job is
planned from its config and TrainingArguments, or from its LightningModule and Trainer, and trained by the real trainer
for a few steps on the emulated node. The claim counts bytes, which do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.claims import Options, Progress, Row, show
from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.devices import Gpu
from gpumem_toolkit.planning.job import Job, TransformersJob, parse_tensor
from gpumem_toolkit.planning.plan import Target
from gpumem_toolkit.planning.planner import plan_job
from tests.emulation.node import GIB, EmulatedNode
from tests.support.paths import REPOSITORY

WORST_PERCENT = 5.0
STEPS = 4
PATIENCE_SECONDS = 300.0
SEQUENCE = 256
TOKENS = {"vocab_size": 16000, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    **TOKENS,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama-bf16": (
        {**DECODER, "model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        {"per_device_train_batch_size": 8, "bf16": True},
    ),
    "qwen2-accumulation": (
        {**DECODER, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
        {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "optim": "adamw_torch"},
    ),
    "qwen3-in-bf16-adafactor": (
        {**DECODER, "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "head_dim": 64, "dtype": "bfloat16"},
        {"per_device_train_batch_size": 8, "optim": "adafactor"},
    ),
    "gpt2-checkpointing": (
        {
            "model_type": "gpt2",
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": 16000,
            "n_embd": 512,
            "n_layer": 4,
            "n_head": 8,
            "bos_token_id": 1,
            "eos_token_id": 2,
        },
        {"per_device_train_batch_size": 8, "activation_checkpointing": True},
    ),
    "vit-sgd": (
        {
            "model_type": "vit",
            "architectures": ["ViTForImageClassification"],
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_hidden_layers": 4,
            "num_attention_heads": 6,
            "image_size": 224,
        },
        {"per_device_train_batch_size": 16, "optim": "sgd"},
    ),
}
LIGHTNING = "lightning-bf16"
LIGHTNING_BATCH = 256
JOBS = (*CONFIGS, LIGHTNING)


def main() -> int:
    options = Options(__doc__)
    options.parser.add_argument("--only", nargs="+", choices=JOBS, metavar="JOB", help="jobs (default: all)")
    options.parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    given = options.read()
    names = given.only or list(JOBS)
    if given.train:
        return _train_all(names, given.train)
    progress = Progress("planner_trainers", len(names) + 1)
    rows: list[Row] = []
    errors: list[float] = []
    with tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as temporary:
        folder = Path(temporary)
        for name, (config, _) in CONFIGS.items():
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        progress.part("training on the emulated node")
        measured = _measure(names, folder)
        for name in names:
            progress.part(f"planning {name}")
            try:
                planned = _plan(name, folder).reserved_peak_bytes
            except ConfigurationError as error:
                rows.append(Row(f"{name}: reserved peak planned", 0, "MiB", beside=str(error)))
                continue
            real = measured[name]
            if isinstance(real, str):
                rows.append(Row(f"{name}: reserved peak planned", planned / 2**20, "MiB", beside=real))
                continue
            errors.append(100 * (planned / real - 1))
            beside = f"measured {real / 2**20:.0f} MiB: {errors[-1]:+.2f} %"
            rows.append(Row(f"{name}: reserved peak planned", planned / 2**20, "MiB", beside=beside))
    rows.append(Row("jobs that could not be compared", len(names) - len(errors), "", limit=0.5))
    rows.append(Row("reserved peak, error, worst", max(map(abs, errors), default=100.0), "%", limit=WORST_PERCENT))
    return show("planner_trainers", rows, as_json=given.json)


def _plan(name: str, folder: Path) -> Any:
    gpu, target = Gpu("benchmark", 80 * GIB), Target()
    if name == LIGHTNING:
        inputs = (parse_tensor("float32[B,512]"), parse_tensor("int64[B]"))
        return plan_job(Job(make_lightning, inputs), gpu, Target(batch=LIGHTNING_BATCH), changes=False)
    job = TransformersJob(str(folder / name), CONFIGS[name][1], SEQUENCE, (), {"convolution": "native"})
    return plan_job(job, gpu, target, changes=False)


def _measure(names: list[str], folder: Path) -> dict[str, Any]:
    """Train the jobs on an emulated node, and return the reserved peak of each, or the text of its error."""
    command = [sys.executable, "-m", "benchmarks.planner_trainers", "--train", str(folder), "--only", *names]
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as temporary,
        EmulatedNode(Path(temporary) / "node", 1, 80 * GIB) as node,
    ):
        done = subprocess.run(command, stdout=subprocess.PIPE, cwd=REPOSITORY, env=node.environment(), check=True)
    return {name: peak for line in done.stdout.splitlines() for name, peak in json.loads(line).items()}


def _train_all(names: list[str], folder: Path) -> int:
    """Train each job in a forked process, which has the imported libraries and a fresh CUDA context."""
    importlib.import_module("lightning.pytorch")
    importlib.import_module("transformers")

    fork = multiprocessing.get_context("fork")
    results = os.dup(1)
    os.dup2(2, 1)
    for name in names:
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_train_one, args=(name, folder, sender))
        process.start()
        print(f"training {name}", file=sys.stderr, flush=True)
        sender.close()
        try:
            peak = receiver.recv() if receiver.poll(PATIENCE_SECONDS) else "the training did not end"
        except EOFError:
            peak = "the training ended without a result"
        process.kill()
        process.join()
        os.write(results, json.dumps({name: peak}).encode() + b"\n")
    return 0


def _train_one(name: str, folder: Path, sender: Any) -> None:
    torch.backends.cudnn.enabled = False  # the emulated node does not have it
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        _train_lightning() if name == LIGHTNING else _train_transformers(name, folder)
    except Exception as error:  # noqa: BLE001 - one job fails alone
        traceback.print_exc()
        sender.send(f"{type(error).__name__}: {str(error).splitlines()[0]}")
        return
    sender.send(torch.cuda.memory_stats(0)["reserved_bytes.all.peak"])


def _train_transformers(name: str, folder: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder / name)
    model = getattr(transformers, config.architectures[0])._from_config(config)
    if config.architectures[0].endswith("Classification"):
        sample = {"pixel_values": torch.zeros(3, 224, 224), "labels": 0}
    else:
        sample = {name: torch.zeros(SEQUENCE, dtype=torch.int64) for name in ("input_ids", "labels")}
    arguments = transformers.TrainingArguments(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        logging_nan_inf_filter=False,
        dataloader_pin_memory=False,
        **CONFIGS[name][1],
    )
    transformers.Trainer(model, arguments, train_dataset=[sample] * 64).train()


def make_lightning(accelerator: str = "cpu") -> tuple[Any, Any]:
    """Return a LightningModule and its Trainer."""
    import lightning.pytorch as lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            layers = [part for _ in range(6) for part in (nn.Linear(512, 512), nn.GELU())]
            self.net = nn.Sequential(*layers, nn.Linear(512, 10))

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    return Module(), lightning.Trainer(
        accelerator=accelerator,
        devices=1,
        max_steps=STEPS,
        precision="bf16-mixed",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def _train_lightning() -> None:
    module, trainer = make_lightning("gpu")
    samples = torch.utils.data.TensorDataset(torch.zeros(2048, 512), torch.zeros(2048, dtype=torch.int64))
    trainer.fit(module, torch.utils.data.DataLoader(samples, batch_size=LIGHTNING_BATCH))


if __name__ == "__main__":
    sys.exit(main())
