"""The training job to plan: from code, from a config of transformers, or from the dimensions of a transformer."""

from __future__ import annotations

import ast
import json
import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from gpumem_client.wire.errors import ConfigurationError

CHOICES = {
    "precision": ("fp32", "bf16", "fp16", "pure-bf16", "pure-fp16"),
    "optimizer": (
        *("adam", "adamw", "sgd", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta", "adafactor", "asgd"),
        *("muon", "rprop", "adam8bit", "adamw8bit", "none"),
    ),
    "loss": ("auto", "cross_entropy", "mse", "mean", "sum", "output"),
    "loop": ("script", "trainer", "lightning"),
    "attention": ("auto", "flash", "efficient", "math", "cudnn"),
    "convolution": ("cudnn", "native"),
}
"""The accepted values of options of a job."""

_PLAIN = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool")
_SHORT = {"double": "float64", "float": "float32", "half": "float16", "fp32": "float32", "fp16": "float16"}
_DTYPES = {name: name for name in _PLAIN} | _SHORT | {"bf16": "bfloat16", "long": "int64", "int": "int32"}
_TENSOR = re.compile(r"\s*(?:(?P<name>\w+)\s*=)?\s*(?P<dtype>\w+)\s*\[(?P<shape>[^\[\]]*)\]\s*")


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor whose shape may depend on the batch size."""

    dtype: str
    shape: tuple[tuple[int, bool], ...]
    """For each dimension a factor, and whether the batch size multiplies it."""
    name: str = ""
    """The keyword argument that receives the tensor; empty for a positional argument."""

    def at(self, batch: int) -> tuple[int, ...]:
        """Return the shape at a batch size."""
        return tuple(factor * batch if scaled else factor for factor, scaled in self.shape)


def parse_tensor(text: str) -> TensorSpec:
    """Parse `[name=]dtype[dimension, …]`; a dimension is a number, `B`, or a product such as `B*512`."""
    match = _TENSOR.fullmatch(text)
    if match is None:
        raise ConfigurationError(f"invalid tensor {text!r}: write float32[B,3,224,224] or tokens=int64[B,1024]")
    dtype = _DTYPES.get(match["dtype"])
    if dtype is None:
        raise ConfigurationError(
            f"invalid dtype {match['dtype']!r} in {text!r}: use one of {', '.join(sorted(_DTYPES))}"
        )
    words = [word.strip() for word in match["shape"].split(",")] if match["shape"].strip() else []
    return TensorSpec(dtype, tuple(_dimension(word, text) for word in words), match["name"] or "")


def _dimension(word: str, text: str) -> tuple[int, bool]:
    parts = [part.strip() for part in word.split("*")]
    numbers = [part for part in parts if part not in ("B", "b")]
    if not all(part.isdecimal() and int(part) > 0 for part in numbers):
        raise ConfigurationError(f"invalid dimension {word!r} in {text!r}: use a number, B, or a product of them")
    if len(numbers) < len(parts) - 1:
        raise ConfigurationError(f"dimension {word!r} in {text!r} contains the batch size more than once")
    return math.prod(map(int, numbers)), len(numbers) < len(parts)


@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
        make_model: returns the module. It is called under a FakeTensorMode, so that the model takes no memory.
        inputs: the arguments of the model.
        targets: the arguments of the loss after the model's output.
        loss: `cross_entropy`, `mse`, `mean`, `sum`, `output`, or a callable of the output and the targets. `auto` uses
            an output that is one number or has a `loss`; otherwise `cross_entropy` for integer targets, `mse` for
            others, and `mean` without targets. An output whose `loss` is None needs targets.
        optimizer: of `torch.optim` in lower case, bitsandbytes' `adam8bit` or `adamw8bit`, `none`, or a callable of the
            parameters.
        optimizer_options: keyword arguments of the optimizer, such as `fused=True` or `momentum=0.9`.
        precision: `fp32`; `bf16` or `fp16`: autocast over fp32 parameters; `pure-bf16` or `pure-fp16`: parameters too.
        attention: the kernel of scaled dot-product attention: `auto`, `flash`, `efficient`, `math` or `cudnn`.
        convolution: `cudnn`, or `native` if cuDNN is off.
        accumulation: backward passes before each optimizer step.
        checkpointing: recompute the model's repeated blocks in backward, in addition to the model's own checkpointing.
        loop: `script`: `out = model(**batch); out.loss.backward()`, and the output lives until the next forward pass
            has ended; `trainer`: the output is dropped before backward; `lightning`: the gradients also stay until the
            next backward.
    """

    make_model: Callable[[], Any]
    inputs: Sequence[TensorSpec]
    targets: Sequence[TensorSpec] = ()
    loss: str | Callable[..., Any] = "auto"
    optimizer: str | Callable[..., Any] = "adamw"
    optimizer_options: Mapping[str, Any] = field(default_factory=dict)
    precision: str = "fp32"
    attention: str = "auto"
    convolution: str = "cudnn"
    accumulation: int = 1
    checkpointing: bool = False
    loop: str = "script"

    def __post_init__(self) -> None:
        for name, accepted in CHOICES.items():
            value = getattr(self, name)
            if isinstance(value, str) and value not in accepted:
                raise ConfigurationError(f"invalid {name} {value!r}: use one of {', '.join(accepted)}")
        if self.accumulation < 1:
            raise ConfigurationError(f"invalid accumulation {self.accumulation}: it must be at least 1")


def read_arguments(given: str | os.PathLike[str] | Mapping[str, Any] | Sequence[str]) -> dict[str, Any]:
    """Return TrainingArguments from a dictionary, a JSON file, or the arguments of a script."""
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, str | os.PathLike):
        try:
            return {**json.loads(Path(given).read_text(encoding="utf-8"))}
        except (OSError, ValueError, TypeError) as error:
            raise ConfigurationError(f"training arguments {given}: {error}; give a file with a JSON object") from error
    # As HfArgumentParser reads them. Arguments of the script itself are among them.
    found: dict[str, Any] = {}
    name = ""
    for word in given:
        if word.startswith("--"):
            name, equals, value = word[2:].replace("-", "_").partition("=")
            found[name] = parse_value(value) if equals else True
        elif name:
            found[name] = parse_value(word)
    return found


def parse_value(text: str) -> Any:
    """Return a literal of Python as its value, `true`, `false` and `none` in any case, and other words as they are."""
    try:
        return ast.literal_eval(text.capitalize() if text.lower() in ("true", "false", "none") else text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True)
class TransformersJob:
    """A model of transformers by its config, and how `Trainer` trains it."""

    path: str
    """A config.json, a folder with one, or the id of a model in the local cache."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """TrainingArguments."""
    sequence: int | None = None
    inputs: Sequence[TensorSpec] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of `Job` that were given, and override the TrainingArguments."""


_HEAD = 64
"""The width of an attention head of a described transformer."""


@dataclass(frozen=True, slots=True)
class Description:
    """The dimensions of a decoder-only transformer, whose output shares the weights of the embedding."""

    layers: int
    hidden: int
    sequence: int
    parameters: int | None = None
    """Total number of parameters; None means a feed-forward part of four times the width."""
    vocabulary: int = 32000

    def job(self, **options: Any) -> Job:
        """Return the job that trains the transformer to predict the next token, with these options of Job."""
        for name in ("layers", "hidden", "sequence", "vocabulary"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"invalid {name} {getattr(self, name)}: it must be at least 1")
        heads = max(1, self.hidden // _HEAD)
        if self.hidden % heads:
            raise ConfigurationError(f"invalid hidden {self.hidden}: it must be a multiple of {_HEAD}")
        make: Callable[[], Any] = partial(
            _make_decoder, self.layers, self.hidden, heads, self._feed_forward(), self.vocabulary
        )
        tokens, targets = f"int64[B,{self.sequence}]", f"int64[B*{self.sequence}]"
        return Job(make, (parse_tensor(tokens),), (parse_tensor(targets),), **options)

    def _feed_forward(self) -> int:
        """Return the width of the feed-forward part that results in the number of parameters."""
        if self.parameters is None:
            return 4 * self.hidden
        # In each block attention has 4h² parameters and the feed-forward part 2hw. The norms are small.
        rest = self.parameters - self.vocabulary * self.hidden - 4 * self.layers * self.hidden**2
        width = rest // (2 * self.layers * self.hidden)
        if width < 1:
            raise ConfigurationError(
                f"{self.parameters} parameters are too few for {self.layers} layers of width {self.hidden} "
                f"and a vocabulary of {self.vocabulary}"
            )
        return width


def _make_decoder(*sizes: int) -> Any:
    from gpumem_toolkit.planning.decoder import Decoder  # imports torch

    return Decoder(*sizes)
