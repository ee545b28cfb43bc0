"""Why a job's code fails in the planner, and what to do next."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)

__all__ = ["explain"]

_PROFILE = "plan from measured steps instead: --profile on a machine with a GPU"
_SPARSE = "SparseTensorImpl"  # in the error of every access to the memory of a sparse tensor
_NEEDS_VALUES = (DataDependentOutputException, DynamicOutputShapeException)
_UNSUPPORTED = (UnsupportedFakeTensorException, UnsupportedOperatorException)
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))


def explain(error: Exception) -> str:
    """Return one line about an error of the job's code: what failed, where, and the next step."""
    if isinstance(error, _NEEDS_VALUES):
        return f"reads a value, which tensors without values do not have: {error.func} at {_place(error)}; {_PROFILE}"
    if _SPARSE in str(error):
        return f"has sparse gradients, whose size depends on values: plan with sparse=False (larger), or {_PROFILE}"
    text = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    if isinstance(error, _UNSUPPORTED):
        return f"uses an operator that tensors without values do not support: {text} at {_place(error)}; {_PROFILE}"
    if isinstance(error, TypeError) and "argument" in str(error):
        return f"fails: {text}; name the model's arguments with --input NAME=TENSOR, such as input_ids=int64[B,512]"
    where = f"fails on tensors without values: {text} at {_place(error)}"
    return f"{where}; run the model once on the CPU with the same shapes, or {_PROFILE}"


def _place(error: Exception) -> str:
    """Return the file and line of the last frame outside PyTorch and the planner."""
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith(_OWN)] or list(frames)
    return f"{outside[-1].filename}:{outside[-1].lineno}"
