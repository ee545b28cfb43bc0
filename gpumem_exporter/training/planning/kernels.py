"""What CUDA kernels allocate for themselves while they run, which no tensor of the program shows.

Each rule is that of the kernel's source, for the device that `_Device` describes; the sizes were held against the
allocator's own trace of real training steps (benchmarks/planner.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gpumem_exporter.training.planning.reductions import reduction_buffers

__all__ = ["Kernels"]

MIB = 1 << 20
BLAS_WORKSPACE_BYTES = 32 * MIB
"""cuBLAS on Hopper (`at::cuda::getChosenWorkspaceSize`); 8 MiB before."""
BLAS_LT_WORKSPACE_BYTES = MIB

_aten = torch.ops.aten
_PRODUCTS = (_aten.mm, _aten.bmm, _aten.baddbmm, _aten.addbmm)


class Kernels:
    """Sizes of an operator's own temporaries, in bytes, by what it was given and what it returned.

    Args:
        convolution: `cudnn` or `native`.
    """

    def __init__(self, convolution: str = "cudnn") -> None:
        self._convolution = convolution

    def temporaries(self, func: Any, args: Sequence[Any], result: Any) -> Sequence[int]:
        """What the operator allocates beside its results, and frees before it returns."""
        packet = getattr(func, "overloadpacket", func)
        if packet in _PRODUCTS:
            return (BLAS_WORKSPACE_BYTES,)
        if packet is _aten.addmm:
            # A bias of one dimension is added in cublasLt's epilogue.
            return (BLAS_LT_WORKSPACE_BYTES if args[0].dim() == 1 else BLAS_WORKSPACE_BYTES,)
        if packet in (_aten.sum, _aten.mean):
            return reduction_buffers(args[0], result)
        rule = _RULES.get(packet)
        if rule is not None:
            return rule(args)
        if packet in (_aten.convolution, _aten.convolution_backward):
            return self._convolve(packet, args)
        return ()

    def _convolve(self, packet: Any, args: Sequence[Any]) -> Sequence[int]:
        backward = packet is _aten.convolution_backward
        x, weight = args[1:3] if backward else args[:2]
        stride, padding, dilation, transposed = args[4:8] if backward else args[3:7]
        if self._convolution == "native":
            return _native_convolution(x, weight, stride, padding, dilation, transposed)
        # cuDNN chooses its algorithm by itself; assumed: a copy of the input in the layout that its kernels want.
        return (_bytes(x),)


def _native_convolution(
    x: torch.Tensor, weight: torch.Tensor, stride: Any, padding: Any, dilation: Any, transposed: bool
) -> Sequence[int]:
    """One sample unfolded into columns, multiplied (`SpatialConvolutionMM.cu`)."""
    kernel = weight.shape[2:]
    if transposed:
        columns = weight[0].numel() * x[0, 0].numel()
    elif all(k == 1 for k in kernel) and all(s == 1 for s in stride) and not any(padding):
        columns = 0
    else:
        places = 1
        for i, k in enumerate(kernel):
            places *= (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (k - 1) - 1) // stride[i] + 1
        columns = weight[0].numel() * places
    return (columns * x.element_size(), BLAS_WORKSPACE_BYTES)


def _flash_backward(args: Sequence[Any]) -> Sequence[int]:
    """The row sums and the query's gradient in float32 (`mha_bwd` in flash_api.cpp)."""
    query = args[1]
    batch, heads, length, size = query.shape
    rounded = _multiple(length, 128)
    return (4 * batch * heads * rounded, 4 * batch * heads * rounded * _multiple(size, 32 if size <= 128 else 64))


def _efficient_backward(args: Sequence[Any]) -> Sequence[int]:
    """Row sums and a staging area for the gradients (`_efficient_attention_backward` in attention_backward.cu)."""
    query, key = args[1:3]
    batch, heads, length, size = query.shape
    rows = 4 * batch * heads * length
    staging = batch * heads * (4 * _multiple(length, 64) * size + 128)
    if query.dtype == torch.float32:
        return (max(rows * size + rows, staging), rows)
    if size > 128:
        staging += 8 * batch * heads * key.shape[2] * size
    return (rows, staging)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _multiple(n: int, of: int) -> int:
    return -(-n // of) * of


_RULES: dict[Any, Callable[[Sequence[Any]], Sequence[int]]] = {
    _aten._scaled_dot_product_flash_attention_backward: _flash_backward,
    _aten._scaled_dot_product_efficient_attention_backward: _efficient_backward,
}
