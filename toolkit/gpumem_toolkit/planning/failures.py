"""Why a job's code fails in the planner, and what to do next."""

from __future__ import annotations

import re
import traceback
from types import TracebackType

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

from gpumem_toolkit.planning.worker import place

_PROFILE = "plan from measured steps instead: --profile on a machine with a GPU"
_SPARSE = "SparseTensorImpl"  # in the error of every access to the memory of a sparse tensor
NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_DEVICE = re.compile(r"\bcuda\b|nvidia driver", re.IGNORECASE)
# Code that runs only on a device, by the start of its module's name.
_ONLY_ON_DEVICES = {
    "triton": "a Triton kernel",
    "torch.nn.attention.flex_attention": "FlexAttention",
    "bitsandbytes": "bitsandbytes",
    "transformers.quantizers.quantizer_bnb": "bitsandbytes",
}


def explain(error: Exception, *, factory: bool = False) -> str:
    """Return one line about an error of the factory or of a training step: what failed, where, and the next step."""
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    frames = traceback.extract_tb(error.__traceback__)
    met = _met(error.__traceback__)
    if met is not None:
        name, depth = met
        return f"uses {name}, which needs a device: {text} at {place(frames[:depth])}; {_PROFILE}"
    where = place(frames)
    if isinstance(error, NEEDS_VALUES):
        return f"reads a value, which tensors without values do not have: {error.func} at {where}; {_PROFILE}"
    if _SPARSE in str(error):
        return f"has sparse gradients, whose size depends on values: plan with sparse=False (larger), or {_PROFILE}"
    if isinstance(error, _UNSUPPORTED):
        return f"uses an operator that tensors without values do not support: {text} at {where}; {_PROFILE}"
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
