"""Which kernel CUDA's scaled dot-product attention takes, and that kernel's own operators.

After `ATen/native/transformers/cuda/sdp_utils.cpp` and `attention.cpp`: flash and cuDNN attention take half-precision
heads of up to 256 without a mask, memory-efficient attention takes float32 and masks too, and `math` is the rest: it
keeps the square of scores.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

__all__ = ["attend", "choose"]

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256


def choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, enable_gqa: bool) -> str:
    """The kernel that `auto` means: flash where it can, then memory-efficient, then math.

    What the job switched off (`torch.nn.attention.sdpa_kernel`, `torch.backends.cuda.enable_flash_sdp`) is left out.
    cuDNN's, which some releases prefer on Hopper, keeps what flash keeps.
    """
    switches = torch.backends.cuda
    four = query.dim() == key.dim() == value.dim() == 4
    same_head = query.shape[-1] == key.shape[-1] == value.shape[-1]
    plain = four and same_head and mask is None and query.dtype in _HALF and query.shape[-1] <= _LARGEST_FLASH_HEAD
    if switches.flash_sdp_enabled() and plain:
        return "flash"
    if switches.mem_efficient_sdp_enabled() and four and not enable_gqa and query.dtype in (*_HALF, torch.float32):
        return "efficient"
    return "math"


def attend(
    kernel: str,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    dropout: float,
    causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Tensor:
    """Attention through the operators of one kernel, so that autograd keeps what it would keep on a GPU."""
    if kernel == "auto":
        kernel = choose(query, key, value, mask, enable_gqa)
    if kernel in ("flash", "cudnn"):
        return _flash(query, key, value, dropout, causal, scale)
    if mask is not None and mask.dtype == torch.bool and kernel != "math":
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
    if kernel == "efficient":
        return _efficient(query, key, value, mask, dropout, causal, scale)
    operator: Any = torch.ops.aten._scaled_dot_product_attention_math.default
    result: Tensor = operator(query, key, value, mask, dropout, causal, None, scale=scale, enable_gqa=enable_gqa)[0]
    return result


def _flash(query: Tensor, key: Tensor, value: Tensor, dropout: float, causal: bool, scale: float | None) -> Tensor:
    head = query.shape[-1]
    short = -head % 8
    if short:
        scale = head**-0.5 if scale is None else scale
        query, key, value = (functional.pad(t, (0, short)) for t in (query, key, value))
    operator: Any = torch.ops.aten._scaled_dot_product_flash_attention.default
    result: Tensor = operator(query, key, value, dropout, causal, False, scale=scale)[0]
    return result[..., :head] if short else result


def _efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout: float, causal: bool, scale: float | None
) -> Tensor:
    keep = torch.is_grad_enabled() and any(t.requires_grad for t in (query, key, value))
    if mask is not None:
        mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    operator: Any = torch.ops.aten._scaled_dot_product_efficient_attention.default
    result: Tensor = operator(query, key, value, mask, keep, dropout, causal, scale=scale)[0]
    return result
