"""The temporary memory of CUDA kernels, which belongs to no tensor.

The rules follow the source of PyTorch 2.15 for an H100. With them the planned peaks in
benchmarks/planner.md and docs/planner.md equal the peaks on the emulated node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

BLAS_WORKSPACE_BYTES = 32 << 20
"""cuBLAS on Hopper (`at::cuda::getChosenWorkspaceSize`); 8 MiB on older GPUs."""
LT_WORKSPACE_BYTES = 1 << 20
"""cublasLt (`at::cuda::blas::_getWorkspaceSize`)."""

MULTIPROCESSORS = 132
THREADS_PER_MULTIPROCESSOR = 2048
MAX_THREADS = 512
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256
"""The number of values that one thread of a reduction adds up."""
# Two allocations of zero bytes, so that every batch size has the same number of events.
_ONE_BLOCK = ((0, 0),)

_aten = torch.ops.aten
_CONVOLUTIONS = (_aten.convolution, _aten.convolution_backward)
# CUDA's kernels of these copy inputs that are not contiguous.
_CONTIGUOUS = (
    *(_aten.native_layer_norm, _aten.native_layer_norm_backward),
    *(_aten._softmax, _aten._softmax_backward_data, _aten._log_softmax, _aten._log_softmax_backward_data),
)
# These compute a tensor as large as the first input: gradient times output, or the losses before their mean.
_ONE_MORE = (_aten._softmax_backward_data, _aten.mse_loss, _aten.smooth_l1_loss)
_PRODUCTS = (_aten.mm, _aten.bmm, _aten.baddbmm, _aten.addbmm)


def prepare(func: Any, args: tuple[Any, ...], convolution: str) -> tuple[Any, ...]:
    """Return the arguments that a kernel works on. New tensors are its copies of inputs, which it frees at the end."""
    packet = getattr(func, "overloadpacket", func)
    if packet in _CONTIGUOUS or (convolution == "native" and packet in _CONVOLUTIONS):
        return tuple(_contiguous(arg) for arg in args)
    if packet is _aten.roll:  # one dimension at a time
        x, shifts, dims = _contiguous(args[0]), args[1], args[2] if len(args) > 2 else ()
        for shift, dim in zip(shifts[:-1], dims[:-1], strict=True):
            x = func(x, [shift], [dim])
        return (x, shifts[-1:], dims[-1:])[: len(args)]
    if packet is _aten._scaled_dot_product_efficient_attention_backward:
        gradient = args[0].transpose(1, 2)  # the layout of the kernel
        if not gradient.is_contiguous():
            return (gradient.contiguous().transpose(1, 2), *args[1:])
    return args


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, torch.Tensor) else value


def temporaries(func: Any, args: Sequence[Any], result: Any, convolution: str) -> Sequence[tuple[int, ...]]:
    """Return the bytes of the allocations that an operator frees before it returns.

    The allocations of one tuple are live at the same time. They are freed before the next tuple is allocated.
    """
    packet = getattr(func, "overloadpacket", func)
    if packet in _PRODUCTS:
        return ((BLAS_WORKSPACE_BYTES,),)
    if packet is _aten.addmm:
        # A bias is added by cublasLt, for half precision also a matrix.
        lt = result.shape[-1] > 1 and (args[0].dim() == 1 or result.element_size() == 2)
        return ((LT_WORKSPACE_BYTES if lt else BLAS_WORKSPACE_BYTES,),)
    if packet in (_aten.sum, _aten.mean):
        return _reduction(args[0], result, args[1] if len(args) > 1 else None)
    if packet is _aten._thnn_fused_lstm_cell_backward_impl and result[2] is not None:
        return _reduction(result[0], result[2], [0])
    if packet is _aten._thnn_fused_gru_cell_backward and result[3] is not None:
        return (*_reduction(result[0], result[3], [0]), *_reduction(result[1], result[4], [0]))
    if packet in _ONE_MORE:
        return ((args[0].numel() * args[0].element_size(),),)
    if packet is _aten._scaled_dot_product_efficient_attention_backward:
        return _attention_backward(args[1], args[3])
    if packet is _aten.convolution:
        return (_convolution(convolution, args[0], args[1], args[3:], backward=False),)
    if packet is _aten.convolution_backward:
        columns = _convolution(convolution, args[1], args[2], args[4:10], backward=True)
        if result[2] is None:
            return (columns,)
        gradient = args[0].contiguous() if convolution == "native" and columns else args[0]
        return (columns, *_reduction(gradient, result[2], [0, *range(2, gradient.dim())]))
    return ()


def _attention_backward(query: torch.Tensor, value: torch.Tensor) -> Sequence[tuple[int, ...]]:
    """The buffers of memory-efficient attention (`mem_eff_attention/kernel_backward.h`, the kernels for sm80)."""
    batch, heads, queries, head = query.shape
    keys, value_head = value.shape[2:]
    half, largest = query.element_size() == 2, max(head, value_head)
    rows = 64 if largest <= 64 else 128
    columns = rows if largest <= 64 or (half and largest <= 128) else 64
    elements = _divide_up(queries, rows) * _divide_up(head, columns) * (rows * columns + 4)
    if half and largest > 128:
        # The head is larger than a block: the gradients of keys and values are kept in float32.
        elements += _divide_up(keys, 64) * 64 * rows * (_divide_up(head, rows) + _divide_up(value_head, rows))
    sums = 4 * batch * heads * queries
    # Kernels for float32 compute the sums of output times gradient before they start.
    before = () if half else ((sums * value_head, sums, sums),)
    return (*before, (sums, 4 * batch * heads * elements))


def _convolution(
    kind: str, x: torch.Tensor, weight: torch.Tensor, geometry: Sequence[Any], *, backward: bool
) -> tuple[int, ...]:
    """The workspace of cuDNN; without cuDNN, one sample as columns, which is multiplied (`ConvolutionMM2d.cu`)."""
    stride, padding, dilation, transposed, _, groups = geometry
    kernel, size = weight.shape[2:], x.element_size()
    if kind == "cudnn":
        # cuDNN chooses an algorithm at run time. This assumes a copy of the input in another layout.
        return (x.numel() * size,)
    if groups == x.shape[1] > 1 and not transposed:
        return ()  # depthwise: computed without columns
    if transposed:
        columns = weight[0].numel() * x[0, 0].numel()
    elif not backward and all(k == 1 for k in kernel) and all(s == 1 for s in stride) and not any(padding):
        columns = 0
    else:
        places = 1
        for i, k in enumerate(kernel):
            places *= (x.shape[2 + i] + 2 * padding[i] - dilation[i] * (k - 1) - 1) // stride[i] + 1
        columns = weight[0].numel() * places
    return (columns * size, BLAS_WORKSPACE_BYTES)


def _reduction(source: torch.Tensor, result: torch.Tensor, removed: Sequence[int] | None) -> Sequence[tuple[int, ...]]:
    """The buffer and the semaphores of a reduction that several thread blocks share (`Reduce.cuh`).

    The dimensions `removed` are summed; None or empty means all.
    """
    outputs, numbers = result.numel(), source.numel()
    if not outputs or not numbers or outputs == numbers:
        return _ONE_BLOCK
    inputs = numbers // outputs
    fastest = min((i for i, n in enumerate(source.shape) if n > 1), key=source.stride)
    contiguous = outputs == 1 or fastest in {i % source.dim() for i in removed or range(source.dim())}
    width, height, vector = _thread_block(inputs, outputs, contiguous, source.shape[fastest])
    step_input, step_output = (width, 1) if contiguous else (1, width)
    if _divide_up(inputs, step_input) < min(height * 16, MAX_VALUES):
        return _ONE_BLOCK
    values = _divide_up(inputs, step_input * height)
    grid = _divide_up(outputs // vector, step_output)
    target = MULTIPROCESSORS * (THREADS_PER_MULTIPROCESSOR // (width * height))
    if values < MAX_VALUES or grid > target:
        return _ONE_BLOCK
    blocks = min(max(_divide_up(target, grid), _divide_up(values, MAX_VALUES)), _divide_up(values, MIN_VALUES))
    if blocks <= 1:
        return _ONE_BLOCK
    size = max(4, result.element_size()) * outputs * blocks
    return ((size if contiguous else size * width * vector, 4 * grid),)


def _thread_block(inputs: int, outputs: int, contiguous: bool, row: int) -> tuple[int, int, int]:
    vector = 1
    first, second = (inputs, outputs) if contiguous else (outputs, inputs)
    if contiguous and first >= 128:
        first //= 4
    elif not contiguous:
        vector = next((v for v in (4, 2) if outputs % v == 0 and row % v == 0), 1)
        first //= vector
    threads = MAX_THREADS // vector
    first_power, second_power = _power_of_two(min(first, threads)), _power_of_two(min(second, threads))
    width = min(first_power, WARP)
    height = min(second_power, threads // width)
    return min(first_power, threads // height), height, vector


def _power_of_two(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def _divide_up(a: int, b: int) -> int:
    return -(-a // b)
