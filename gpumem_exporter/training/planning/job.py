"""What a training job is, as far as its memory is concerned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.planning.inputs import TensorSpec

__all__ = ["LOSSES", "OPTIMIZERS", "PRECISIONS", "Job"]

PRECISIONS = ("fp32", "bf16", "fp16", "pure-bf16", "pure-fp16")
"""fp32; autocast in bf16 or fp16 over fp32 parameters; parameters themselves in bf16 or fp16."""
OPTIMIZERS = ("adam", "adamw", "sgd", "adagrad", "rmsprop", "nadam", "radam", "adamax", "adadelta", "none")
ATTENTIONS = ("auto", "flash", "efficient", "math", "cudnn")
CONVOLUTIONS = ("cudnn", "native")
LOSSES = ("auto", "cross_entropy", "mse", "mean", "sum", "output")


@dataclass(frozen=True)
class Job:
    """One training job.

    Attributes:
        make_model: returns the module; called with fake tensors in force, so that it takes no memory.
        inputs: what the model is called with; dimensions may hold the batch size.
        targets: what the loss is called with after the model's output.
        loss: one of LOSSES, or a callable of the output and the targets. `auto`: the output itself where it is a
            number or has a `loss`; `cross_entropy` with integer targets, `mse` with others; `mean` without.
        optimizer: one of OPTIMIZERS, or a callable of the parameters.
        optimizer_options: keyword arguments of it (`fused=True`, `momentum=0.9`).
        precision: one of PRECISIONS.
        attention: which kernel scaled dot-product attention takes (one of ATTENTIONS).
        convolution: `cudnn`, or `native` where cuDNN is off.
        accumulation: backward passes before each optimizer step.
        checkpointing: recompute the repeated blocks of the model in backward; what the model does by itself stays.
        frozen: keep all parameters fixed but those of the model's last layer that has some.
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
    frozen: bool = False

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise ConfigurationError(f"precision {self.precision!r}; it is one of {', '.join(PRECISIONS)}")
        if isinstance(self.optimizer, str) and self.optimizer not in OPTIMIZERS:
            raise ConfigurationError(f"optimizer {self.optimizer!r}; it is one of {', '.join(OPTIMIZERS)}")
        if isinstance(self.loss, str) and self.loss not in LOSSES:
            raise ConfigurationError(f"loss {self.loss!r}; it is one of {', '.join(LOSSES)}")
        if self.attention not in ATTENTIONS:
            raise ConfigurationError(f"attention {self.attention!r}; it is one of {', '.join(ATTENTIONS)}")
        if self.convolution not in CONVOLUTIONS:
            raise ConfigurationError(f"convolution {self.convolution!r}; it is one of {', '.join(CONVOLUTIONS)}")
        if self.accumulation < 1:
            raise ConfigurationError(f"accumulation {self.accumulation}; it counts backward passes, at least 1")

    def changed(self, **fields: Any) -> Job:
        """The same job with other values."""
        return replace(self, **fields)
