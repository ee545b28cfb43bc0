"""Builds the job's model from fake tensors, applies the job's options to it, and explains its errors."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from gpumem_client.wire.errors import ConfigurationError
from gpumem_toolkit.planning.job import Job
from gpumem_toolkit.planning.planner_process import place

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "pure-bf16": torch.bfloat16, "pure-fp16": torch.float16}


_FEW_VALUES = 4096
_PROFILE = "plan from measured steps instead: --profile on a machine with a GPU"
_SPARSE = "SparseTensorImpl"  # in the error of every access to the memory of a sparse tensor
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_DEVICE = re.compile(r"\bcuda\b|nvidia driver", re.IGNORECASE)
# Code that runs only on a device, by the start of its module's name.
_ONLY_ON_DEVICES = {
    "triton": "a Triton kernel",
    "torch.nn.attention.flex_attention": "FlexAttention",
    "bitsandbytes": "bitsandbytes",
    "transformers.quantizers.quantizer_bnb": "bitsandbytes",
}


def make_fake_mode() -> FakeTensorMode:
    """Return a mode in which tensors take no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    # A deep copy of a fake tensor (nn.TransformerEncoder copies its layer) must keep the same mode.
    mode.__deepcopy__ = lambda _: mode  # type: ignore[attr-defined]
    return mode


@contextmanager
def without_values() -> Iterator[None]:
    """Let PyTorch's code for modules run on tensors without values within the context."""
    # `Module.to`, `half` and `bfloat16` swap fake parameters with `swap_tensors`, which refuses tensors with weak
    # references. The fake mode has one to each parameter. So the data is assigned, and tied parameters stay tied.
    swap = torch.utils.swap_tensors
    # `nn.init.trunc_normal_` samples until all values are in its range. It reads values, and in memory that is not
    # initialized it never ends. It is skipped, as PyTorch does for meta tensors.
    sample = nn.init._no_grad_trunc_normal_

    def assign(parameter: Tensor, converted: Tensor) -> None:
        if isinstance(parameter, FakeTensor):
            parameter.data = converted.detach().to(parameter.device)
        else:
            swap(parameter, converted)

    torch.utils.swap_tensors = assign
    nn.init._no_grad_trunc_normal_ = lambda tensor, *_, **__: tensor
    # The assertions of transformers read values, such as the number of image tokens. They are off from here on.
    os.environ["TRANSFORMERS_DISABLE_TORCH_CHECK"] = "1"
    try:
        yield
    finally:
        torch.utils.swap_tensors = swap
        nn.init._no_grad_trunc_normal_ = sample


def make_model(job: Job, mode: FakeTensorMode) -> nn.Module:
    """Build the module in training mode. `mode` must not be active. Raises ConfigurationError if the factory fails."""
    try:
        model = _built(job, mode)
    except ConfigurationError:
        raise
    except Exception as error:
        raise ConfigurationError(f"the model factory {explain(error, factory=True)}") from error
    if not isinstance(model, nn.Module):
        raise ConfigurationError(f"the model factory returned {type(model).__name__}, not a torch.nn.Module")
    with mode:
        if job.precision.startswith("pure-"):
            # `Module.to(dtype)` refuses to swap fake parameters with other references.
            dtype = DTYPES[job.precision]
            _replace(model, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
        if job.checkpointing:
            checkpoint_blocks(model)
    return model.train()


def _built(job: Job, mode: FakeTensorMode) -> Any:
    try:
        with mode:
            return job.make_model()
    except _NEEDS_VALUES:
        # The factory reads values, for example with `.tolist()` or `torch.unique`: build the model in memory, then
        # replace its tensors.
        with _Uninitialized():
            model = job.make_model()
        if isinstance(model, nn.Module):
            _replace(model, mode.from_tensor)
        return model


@contextmanager
def eager() -> Iterator[None]:
    """Keep Dynamo from compiling the model, and the planner's functions that the model's operators call."""
    with torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext():
        yield


class _Uninitialized(TorchDispatchMode):
    """Skips operators that fill large tensors: initial weights take most of the time; hardly any code reads them."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        skipped = func._schema.name.endswith("_") and isinstance(args[0], Tensor) and args[0].numel() > _FEW_VALUES
        return args[0] if skipped else func(*args, **(kwargs or {}))


def _replace(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace every parameter and buffer; tied ones stay tied."""
    made: dict[int, Tensor] = {}
    kept: list[Tensor] = []  # keeps ids from being reused
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    kept.append(parameter)
                    made[id(parameter)] = nn.Parameter(change(parameter.detach()), parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]  # type: ignore[assignment]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                kept.append(buffer)
                module._buffers[name] = made.setdefault(id(buffer), change(buffer))


def find_blocks(model: nn.Module) -> tuple[str, list[nn.Module]]:
    """Return name and blocks of the longest `nn.ModuleList` or `nn.Sequential` of one class with parameters.

    Raises ConfigurationError if no list has at least two blocks.
    """
    name, blocks = "", list[nn.Module]()
    for path, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        children = list(dict.fromkeys(module))
        alike = len({type(child) for child in children}) == 1 and any(True for _ in children[0].parameters())
        if alike and len(children) > max(1, len(blocks)):
            name, blocks = path, children
    if not blocks:
        raise ConfigurationError(
            f"{type(model).__name__} has no nn.ModuleList and no nn.Sequential of two or more blocks of one class"
            " (compare_checkpointing accepts blocks=[...])"
        )
    return name, blocks


def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function under a checkpoint, which saves only the inputs for backward."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return run


def checkpoint_blocks(model: nn.Module) -> None:
    """Checkpoint the model's repeated blocks."""
    for block in find_blocks(model)[1]:
        block.forward = recomputed(block.forward)


def explain(error: Exception, *, factory: bool = False) -> str:
    """Return one line about an error of the factory or of a training step: what failed, where, and the next step."""
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    met = _met(error.__traceback__)
    if met is not None:
        name, depth = met
        return f"uses {name}, which needs a device: {text} at {place(frames[:depth])}; {_PROFILE}"
    where = place(frames)
    if isinstance(error, _NEEDS_VALUES):
        return f"reads a value, which tensors without values do not have: {error.func} at {where}; {_PROFILE}"
    if _SPARSE in str(error):
        return f"has sparse gradients, whose size depends on values: plan with sparse=False (larger), or {_PROFILE}"
    if _DEVICE.search(str(error)):
        return (
            f"names a device, and the planner's tensors are on the CPU: {text} at {where}; "
            "use the device of an input or a parameter, such as x.to(self.weight.device)"
        )
    if factory:
        return f"fails: {text} at {where}; call it once without the planner; if it works there, {_PROFILE}"
    if isinstance(error, TypeError) and "argument" in str(error):
        return f"fails: {text}; name the model's arguments with --input NAME=TENSOR, such as input_ids=int64[B,512]"
    return (
        f"fails on tensors without values: {text} at {where}; "
        f"run the model once on the CPU with the same shapes, or {_PROFILE}"
    )


def _met(trace: TracebackType | None) -> tuple[str, int] | None:
    """Return the first code of a traceback that runs only on a device, and the number of frames before it."""
    for depth, (frame, _) in enumerate(traceback.walk_tb(trace)):
        module = str(frame.f_globals.get("__name__"))
        for start, name in _ONLY_ON_DEVICES.items():
            if module == start or module.startswith((f"{start}.", f"{start}_")):
                kernel = getattr(frame.f_locals.get("self"), "__name__", "")
                return f"{name} {kernel}".strip() if start == "triton" else name, depth
    return None
