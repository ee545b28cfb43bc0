"""Makes fake CPU tensors run the operators that CUDA tensors would run.

The planner's tensors are on the CPU, because fake CUDA tensors fail in backward on a machine without a GPU. Above the
dispatch mode the two devices differ in two ways: the operators that autocast runs in float32
(`ATen/autocast_mode.h`), and the fused operators. The registrations apply to all CPU tensors of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from gpumem_exporter.training.planning.fused_operators import attention, dropout, rms_norm

__all__ = ["cuda_rules"]

_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "group_norm"),
    *("nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "dist", "pdist"),
    *("binary_cross_entropy_with_logits", "cdist", "renorm", "logsumexp", "rms_norm"),
)
"""CUDA's autocast casts the inputs of these to float32."""

_FLOAT32_DTYPE = (
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"),
)
"""CUDA's autocast sets the argument `dtype` of these to float32."""


@contextmanager
def cuda_rules(attention_kernel: str) -> Iterator[None]:
    """Make CPU tensors follow CUDA's rules within the context.

    Args:
        attention_kernel: auto, flash, efficient, math or cudnn.
    """
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _rules_of("AutocastCPU") - _rules_of("AutocastCUDA"):
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        for name in _FLOAT32:
            _register(library, name, _in_float32)
        for name in _FLOAT32_DTYPE:
            _register(library, name, _with_float32_dtype)
        library.impl("dropout", dropout, "AutogradCPU")
        if hasattr(torch.ops.aten, "_fused_rms_norm"):
            library.impl("rms_norm", rms_norm, "AutogradCPU")
        library.impl("scaled_dot_product_attention", attention(attention_kernel), "AutogradCPU")
        yield
    finally:
        library._destroy()


def _rules_of(key: str) -> set[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}


def _register(library: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    qualified = f"aten::{name}"
    if not torch._C._dispatch_has_kernel(qualified):
        return  # this release of torch does not have the operator
    if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, "AutocastCPU"):
        return  # the CPU has the same rule
    packet, _, overload = name.partition(".")
    library.impl(name, make(getattr(getattr(torch.ops.aten, packet), overload or "default")), "AutocastCPU")


def _in_float32(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            return operator(*tree_map(_to_float32, args), **tree_map(_to_float32, kwargs))

    return run


def _with_float32_dtype(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        low = [t for t in args if isinstance(t, torch.Tensor) and t.dtype in (torch.float16, torch.bfloat16)]
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)):
            if not low or any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
                return operator(*args, **kwargs)
            return operator(*_without_dtype(operator, args), **{**kwargs, "dtype": torch.float32})

    return run


def _without_dtype(operator: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the positional arguments before `dtype`."""
    names = [argument.name for argument in operator._schema.arguments]
    return args[: names.index("dtype")]


def _to_float32(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.dtype in (torch.float16, torch.bfloat16):
        return value.to(torch.float32)
    return value
