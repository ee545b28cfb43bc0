"""Fused operators of CUDA for which the CPU runs several operators: attention, dropout and RMS norm.

Attention follows `ATen/native/transformers/cuda/sdp_utils.cpp` and `attention.cpp`. Flash and cuDNN attention take
half-precision heads of up to 256 without a mask. Memory-efficient attention also takes float32 and masks. `math` takes
all other inputs, and keeps the square matrix of scores.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["attention", "dropout", "rms_norm"]

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256


def attention(kernel: str) -> Callable[..., Tensor]:
    """Return `scaled_dot_product_attention` as one kernel. Autograd then saves the same tensors as on a GPU.

    Args:
        kernel: auto, flash, efficient, math or cudnn. `auto` chooses as PyTorch does.
    """

    def run(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None = None,
        dropout: float = 0.0,
        causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        chosen = _choose(query, key, value, mask, enable_gqa) if kernel == "auto" else kernel
        if chosen in ("flash", "cudnn"):
            return _flash(query, key, value, dropout, causal, scale)
        if chosen == "efficient":
            return _efficient(query, key, value, mask, dropout, causal, scale)
        operator: Any = torch.ops.aten._scaled_dot_product_attention_math.default
        result: Tensor = operator(query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=enable_gqa)[0]
        return result

    return run


def _choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """Prefer flash, then memory-efficient attention, unless the job has disabled them.

    Some releases prefer cuDNN's on Hopper, which saves the same tensors as flash.
    """
    backends = torch.backends.cuda
    four = query.dim() == key.dim() == value.dim() == 4
    same_head = query.shape[-1] == key.shape[-1] == value.shape[-1]
    plain = four and same_head and mask is None and query.dtype in _HALF and query.shape[-1] <= _LARGEST_FLASH_HEAD
    if backends.flash_sdp_enabled() and plain:
        return "flash"
    if backends.mem_efficient_sdp_enabled() and four and not enable_gqa and query.dtype in (*_HALF, torch.float32):
        return "efficient"
    return "math"


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    head = query.shape[-1]
    padding = -head % 8
    if padding:
        scale = head**-0.5 if scale is None else scale
        query, key, value = (functional.pad(t, (0, padding)) for t in (query, key, value))
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    result: Tensor = operator(query, key, value, dropout, causal, False, scale=scale)[0]
    return result[..., :head] if padding else result


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    training = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if mask is not None:
        if mask.dtype == torch.bool:
            mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    operator: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    result: Tensor = operator(query, key, value, mask, training, dropout, causal, scale=scale)[0]
    return result


def dropout(x: Tensor, probability: float, train: bool) -> Tensor:
    """`torch.dropout` as CUDA runs it, with a mask of one byte per element."""
    if not train or probability == 0 or x.numel() == 0:
        return x
    if probability == 1:
        return x * torch.zeros((), dtype=x.dtype)
    result: Tensor = torch.ops.aten.native_dropout(x, probability, train)[0]
    return result


def rms_norm(
    x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """`torch.rms_norm` as CUDA runs it: fused if input and weight have the same dtype (`layer_norm.cpp`)."""
    if weight is not None and weight.dtype != x.dtype:
        square = x.float().pow(2).mean(tuple(range(-len(normalized_shape), 0)), keepdim=True)
        return (x * torch.rsqrt(square + (eps or 0.0))).type_as(x) * weight
    result: Tensor = _RmsNorm.apply(x, weight, len(normalized_shape))
    return result


class _RmsNorm(torch.autograd.Function):
    """Allocates as `_fused_rms_norm` and its backward do: the input and one number per row. Computes no values."""

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
