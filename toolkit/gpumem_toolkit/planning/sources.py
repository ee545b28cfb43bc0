"""Jobs from what people have: a config of transformers with TrainingArguments, or a LightningModule with its Trainer.

Runs in the planner's process, where transformers or Lightning is imported only if the job uses it.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.fake_model import make_fake_mode, without_values
from gpumem_toolkit.planning.job import Job, TensorSpec, TransformersJob, parse_tensor

# The inputs of a model by the end of its class's name. `S` is the length of a sequence.
_INPUTS = {
    "ForCausalLM": ("input_ids=int64[B,S]", "labels=int64[B,S]"),
    "LMHeadModel": ("input_ids=int64[B,S]", "labels=int64[B,S]"),
    "ForMaskedLM": ("input_ids=int64[B,S]", "attention_mask=int64[B,S]", "labels=int64[B,S]"),
    "ForTokenClassification": ("input_ids=int64[B,S]", "attention_mask=int64[B,S]", "labels=int64[B,S]"),
    "ForSequenceClassification": ("input_ids=int64[B,S]", "attention_mask=int64[B,S]", "labels=int64[B]"),
    "ForConditionalGeneration": ("input_ids=int64[B,S]", "attention_mask=int64[B,S]", "labels=int64[B,S]"),
    "ForImageClassification": ("pixel_values=float32[B,C,I,I]", "labels=int64[B]"),
}
_OPTIMIZERS: dict[str, Any] = {
    **{name: name for name in ("adafactor", "sgd", "adagrad", "rmsprop")},
    **dict.fromkeys(("adamw_torch", "adamw_torch_fused"), "adamw"),
    **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit"), "adamw8bit"),
}
# TrainingArguments that a plan would be wrong without.
_NOT_PLANNED = ("deepspeed", "fsdp", "torch_compile", "use_liger_kernel", "optim_target_modules")
_PRECISIONS = {
    "32-true": "fp32",
    "bf16-mixed": "bf16",
    "16-mixed": "fp16",
    "bf16-true": "pure-bf16",
    "16-true": "pure-fp16",
}


def transformers_job(given: TransformersJob) -> tuple[Job, int | None]:
    """Return the job, and the batch size that the TrainingArguments have."""
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise ConfigurationError(f"{given.path}: planning a config needs the Python package transformers") from error
    try:
        config = transformers.AutoConfig.from_pretrained(given.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigurationError(
            f"{given.path!r} is no MODULE:FACTORY, no config.json and no model in the local cache: {error}"
        ) from error
    names = getattr(config, "architectures", None)
    if not names:
        names = [transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type)]
    make = getattr(transformers, names[0] or "", None)
    if make is None:
        raise ConfigurationError(f"{given.path}: transformers has no class {names[0]!r}; use MODULE:FACTORY")
    arguments: dict[str, Any] = {each.name: each.default for each in dataclasses.fields(transformers.TrainingArguments)}
    arguments |= given.arguments
    for name in _NOT_PLANNED:
        if arguments.get(name):
            raise ConfigurationError(f"TrainingArguments.{name} is not planned; --profile measures, or remove it")
    optim = str(arguments["optim"])
    if optim not in _OPTIMIZERS:
        raise ConfigurationError(f"optim {optim!r} is not planned: use one of {', '.join(_OPTIMIZERS)}")
    optimizer = _OPTIMIZERS[optim]
    if optim == "adafactor":
        optimizer = partial(transformers.Adafactor, lr=1e-3, scale_parameter=False, relative_step=False)
    precision = "bf16" if arguments["bf16"] else "fp16" if arguments["fp16"] else "fp32"
    checkpointing = arguments.get("activation_checkpointing") or arguments.get("gradient_checkpointing")
    job = Job(
        partial(_transformers_model, make, config, mixed=precision != "fp32", checkpointing=bool(checkpointing)),
        given.inputs or _inputs(given, names[0], config),
        optimizer=optimizer,
        optimizer_options={"fused": True} if optim == "adamw_torch_fused" else {},
        precision=precision,
        accumulation=int(arguments["gradient_accumulation_steps"]),
        loop="trainer",
    )
    batch = int(arguments["per_device_train_batch_size"]) if given.arguments else None
    return replace(job, **given.options), batch


def _inputs(given: TransformersJob, name: str, config: Any) -> tuple[TensorSpec, ...]:
    texts = next((texts for end, texts in _INPUTS.items() if name.endswith(end)), None)
    if texts is None:
        raise ConfigurationError(f"the inputs of {name} are not known: give them with --input NAME=TENSOR")
    lengths = (given.arguments.get(each) for each in ("max_length", "max_seq_length", "block_size"))
    sequence = given.sequence or next((each for each in lengths if each), None)
    if "S" in texts[0] and sequence is None:
        raise ConfigurationError(f"{name} needs the length of its samples: give --sequence")
    sizes = {"S": sequence, "C": getattr(config, "num_channels", 3), "I": getattr(config, "image_size", 224)}
    for letter, size in sizes.items():
        texts = tuple(text.replace(f",{letter}", f",{size}") for text in texts)
    return tuple(map(parse_tensor, texts))


def _transformers_model(make: Any, config: Any, *, mixed: bool, checkpointing: bool) -> nn.Module:
    model: Any = make._from_config(config)  # in the dtype of the config, as `from_pretrained`
    model.config.use_cache = False  # as Trainer
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return _Float32Outputs(model) if mixed else model


class _Float32Outputs(nn.Module):
    """A model as accelerate prepares it for mixed precision: its outputs are copied to float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any, **named: Any) -> Any:
        """Run the model."""
        low = (torch.float16, torch.bfloat16)
        output = self.model(*args, **named)
        loss = output.loss
        kept = tree_map(
            lambda leaf: leaf.float() if isinstance(leaf, Tensor) and leaf.dtype in low else leaf, dict(output)
        )
        return type(output)(**{**kept, "loss": loss})


def lightning_job(job: Job) -> Job:
    """Return the job of Lightning's loop if the factory returns a LightningModule, alone or with its Trainer."""
    names = ("lightning.pytorch", "pytorch_lightning")
    if not any(name in sys.modules or find_spec(name.partition(".")[0]) is not None for name in names):
        return job
    try:
        with without_values(), make_fake_mode():
            made = job.make_model()  # it may import Lightning
    except Exception:  # noqa: BLE001 - building the model of the plan explains the error
        return job
    kinds = tuple(library.LightningModule for name in names if (library := sys.modules.get(name)) is not None)
    module, trainer = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, kinds):
        return job
    if job.optimizer != "adamw" or job.loss != "auto":
        raise ConfigurationError("a LightningModule has its own optimizer and loss: leave out both")
    if not module.automatic_optimization:
        raise ConfigurationError("a LightningModule with manual optimization: plan its model with MODULE:FACTORY")
    precision = "32-true" if trainer is None else str(trainer.precision)
    if precision not in _PRECISIONS:
        raise ConfigurationError(f"precision {precision!r} of the Trainer is not planned: {', '.join(_PRECISIONS)}")
    return replace(
        job,
        make_model=partial(_lightning_model, job.make_model),
        inputs=(*job.inputs, *job.targets),
        targets=(),
        loss="output",
        optimizer="none",  # the module's own
        precision=job.precision if trainer is None else _PRECISIONS[precision],
        accumulation=job.accumulation if trainer is None else trainer.accumulate_grad_batches,
        loop="lightning",
    )


def _lightning_model(make: Callable[[], Any]) -> nn.Module:
    made = make()
    return LightningStep(made[0] if isinstance(made, tuple) else made)


class LightningStep(nn.Module):
    """A LightningModule whose forward pass is its training step."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **named: Any) -> Any:
        """Return the loss of a batch: a tensor, a list of tensors as a DataLoader collates them, or a dictionary."""
        output = self.module.training_step(named or (args[0] if len(args) == 1 else list(args)), 0)
        return output["loss"] if isinstance(output, Mapping) else output

    def make_optimizer(self) -> Any:
        """Return the optimizer of `configure_optimizers`."""
        made = self.module.configure_optimizers()
        while isinstance(made, Mapping | tuple | list):
            if not isinstance(made, Mapping) and len(made) != 1 and not isinstance(made[0], list):
                raise ConfigurationError(f"configure_optimizers returns {len(made)} optimizers; a plan is for one")
            made = made["optimizer"] if isinstance(made, Mapping) else made[0]
        return made
