"""What the fused RMS norm of CUDA keeps and makes: the input and one number a row, where the CPU keeps every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["fused_rms_norm"]


class _Fused(torch.autograd.Function):
    """Allocates as `_fused_rms_norm` and its backward do. The values mean nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dimensions: int) -> Tensor:
        result = torch.empty_like(x)
        inverse = torch.empty((*x.shape[: x.dim() - dimensions], *[1] * dimensions), dtype=torch.float32)
        ctx.save_for_backward(x, weight, inverse)
        return result

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors[:2]
        return torch.empty_like(x), None if weight is None else torch.empty_like(weight), None


def fused_rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`torch.rms_norm` as CUDA runs it: fused where input and weight have one dtype (`layer_norm.cpp`)."""
    if weight is not None and weight.dtype != x.dtype:
        square = x.float().pow(2).mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
        return (x * torch.rsqrt(square + (eps or 0.0))).type_as(x) * weight
    result: Tensor = _Fused.apply(x, weight, len(normalized_shape))
    return result
