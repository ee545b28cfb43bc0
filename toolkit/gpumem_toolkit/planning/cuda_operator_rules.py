"""Makes fake CPU tensors run the operators that CUDA tensors would run.

The planner's tensors are on the CPU, because fake CUDA tensors fail in backward on a machine without a GPU. The
registrations apply to all CPU tensors of the process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from gpumem_toolkit.planning import recurrent

# CUDA's autocast casts the inputs of these to float32 (`ATen/autocast_mode.h`).
_FLOAT32 = (
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "group_norm"),
    *("nuclear_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss", "dist", "pdist"),
    *("binary_cross_entropy_with_logits", "cdist", "renorm", "logsumexp", "rms_norm"),
)

# CUDA's autocast sets the argument `dtype` of these to float32.
_FLOAT32_DTYPE = "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "sum", "sum.dim_IntList"

_HALF = (torch.float16, torch.bfloat16)
_LARGEST_FLASH_HEAD = 256


@contextmanager
def cuda_rules(attention_kernel: str, convolution: str) -> Iterator[None]:
    """Make CPU tensors follow CUDA's rules within the context. `convolution` is `cudnn`, or `native` without cuDNN."""
    # Above the dispatch mode the two devices differ in two ways: the operators that autocast runs in float32, and the
    # fused operators. Below it, `kernel_memory_rules` has the temporary memory of CUDA's kernels.
    library = torch.library.Library("aten", "IMPL")
    try:
        for name in _rules_of("AutocastCPU") - _rules_of("AutocastCUDA"):
            library.impl(name, torch.library.fallthrough_kernel, "AutocastCPU")
        for make, names in ((_in_float32, _FLOAT32), (_with_float32_dtype, _FLOAT32_DTYPE)):
            for name in names:
                _register(library, name, make)
        for name in recurrent.LOWER_PRECISION:
            _register(library, name, _in_lower_precision)
        for name, rule in recurrent.rules(cudnn=convolution == "cudnn").items():
            library.impl(name, rule, "AutogradCPU")
        library.impl("dropout", _dropout, "AutogradCPU")
        library.impl("linear", _linear, "AutogradCPU")
        if hasattr(torch.ops.aten, "_fused_rms_norm"):
            library.impl("rms_norm", _rms_norm, "AutogradCPU")
        library.impl("scaled_dot_product_attention", _attention(attention_kernel), "AutogradCPU")
        yield
    finally:
        library._destroy()


def _rules_of(key: str) -> set[str]:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key(key)
    return {name.removeprefix("aten::") for name in registered if name.startswith("aten::")}


def _register(library: Any, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    exists, has_rule = torch._C._dispatch_has_kernel, torch._C._dispatch_has_kernel_for_dispatch_key
    # Some releases of torch do not have the operator. For some operators the CPU has the same rule.
    if exists(f"aten::{name}") and not has_rule(f"aten::{name}", "AutocastCPU"):
        packet, _, overload = name.partition(".")
        library.impl(name, make(getattr(getattr(torch.ops.aten, packet), overload or "default")), "AutocastCPU")


def _in_float32(operator: Any) -> Callable[..., Any]:
    return _cast(operator, lambda: torch.float32, _HALF)


def _in_lower_precision(operator: Any) -> Callable[..., Any]:
    return _cast(operator, lambda: torch.get_autocast_dtype("cpu"), (torch.float32,))


def _cast(operator: Any, target: Callable[[], torch.dtype], sources: tuple[torch.dtype, ...]) -> Callable[..., Any]:
    def cast(value: Any) -> Any:
        return value.to(target()) if isinstance(value, Tensor) and value.dtype in sources else value

    def run(*args: Any, **kwargs: Any) -> Any:
        with _without_autocast():
            return operator(*tree_map(cast, args), **tree_map(cast, kwargs))

    return run


def _with_float32_dtype(operator: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        low = any(isinstance(each, Tensor) and each.dtype in _HALF for each in args)
        with _without_autocast():
            if not low or any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
                return operator(*args, **kwargs)
            names = [argument.name for argument in operator._schema.arguments]
            return operator(*args[: names.index("dtype")], **{**kwargs, "dtype": torch.float32})

    return run


def _without_autocast() -> Any:
    # As in autocast's own kernels: the operator would otherwise come here again.
    return torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU))


def _attention(kernel: str) -> Callable[..., Tensor]:
    """Return `scaled_dot_product_attention` as one kernel. Autograd then saves the same tensors as on a GPU."""

    def run(
        query: Tensor, key: Tensor, value: Tensor, mask: Any = None, p: float = 0.0, causal: bool = False, **named: Any
    ) -> Tensor:
        aten, scale = torch.ops.aten, named.get("scale")
        chosen = _choose(query, key, value, mask) if kernel == "auto" else kernel
        if chosen in ("flash", "cudnn"):
            flash = aten._scaled_dot_product_flash_attention.default
            return flash(query, key, value, p, causal, False, scale=scale)[0]
        if chosen == "efficient":
            training = torch.is_grad_enabled() and any(each.requires_grad for each in (query, key, value))
            if mask is not None:
                # As `convert_boolean_attn_mask` of `attention.cpp`: the new mask takes memory.
                if mask.dtype == torch.bool:
                    mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), float("-inf"))
                mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
            efficient = aten._scaled_dot_product_efficient_attention.default
            return efficient(query, key, value, mask, training, p, causal, scale=scale)[0]
        return aten._scaled_dot_product_attention_math.default(query, key, value, mask, p, causal, None, **named)[0]

    return run


def _choose(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> str:
    """Prefer flash, then memory-efficient attention, unless the job has disabled them."""
    # As `ATen/native/transformers/cuda/sdp_utils.cpp` and `attention.cpp`. Flash and cuDNN attention take heads of up
    # to 256 in half precision, without a mask; some releases prefer cuDNN's on Hopper, which saves the same tensors as
    # flash. Memory-efficient attention also takes float32 and masks. `math` takes all other inputs, and keeps the
    # square matrix of scores.
    backends = torch.backends.cuda
    four = query.dim() == key.dim() == value.dim() == 4
    same_head = query.shape[-1] == key.shape[-1] == value.shape[-1]
    plain = four and same_head and mask is None and query.dtype in _HALF and query.shape[-1] <= _LARGEST_FLASH_HEAD
    if backends.flash_sdp_enabled() and plain:
        return "flash"
    if backends.mem_efficient_sdp_enabled() and four and query.dtype in (*_HALF, torch.float32):
        return "efficient"
    return "math"


def _dropout(x: Tensor, probability: float, train: bool) -> Tensor:
    """`torch.dropout` as CUDA runs it, with a mask of one byte per element."""
    return x if not train or probability == 0 else torch.ops.aten.native_dropout(x, probability, train)[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.linear`, which adds the bias in place if the input is not contiguous; not under a dispatch mode."""
    if bias is not None and x.dim() > 2 and not x.is_contiguous():
        return torch.matmul(x, weight.t()).add_(bias)
    composite = torch._C.DispatchKey.CompositeImplicitAutograd
    return torch.ops.aten.linear.default._op_dk(composite, x, weight, bias)


def _rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, _eps: float | None = None) -> Tensor:
    """`torch.rms_norm` as CUDA runs it, fused (`layer_norm.cpp`)."""
    return _RmsNorm.apply(x, weight, len(shape))


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
