"""How much a reduction over many numbers allocates to be split over thread blocks (`ATen/native/cuda/Reduce.cuh`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["reduction_buffers"]

MULTIPROCESSORS = 132
THREADS_A_MULTIPROCESSOR = 2048
MAX_THREADS = 512
WARP = 32
MIN_VALUES, MAX_VALUES = 16, 256
_NONE = (0, 0)


def reduction_buffers(source: torch.Tensor, result: torch.Tensor) -> Sequence[int]:
    """The buffer and the semaphores of one reduction, in bytes; zeros where one block does it."""
    outputs, numbers = result.numel(), source.numel()
    if not outputs or not numbers or outputs == numbers:
        return _NONE
    inputs = numbers // outputs
    # Whether the numbers that lie together belong to one result: the last dimension goes.
    together = outputs == 1 or source.dim() == 0 or (source.shape[-1] > 1 and _last_goes(source, result))
    width, height, vector = _block(inputs, outputs, together, source)
    step_input, step_output = (width, 1) if together else (1, width)
    if _up(inputs, step_input) < min(height * 16, MAX_VALUES):
        return _NONE
    step_input *= height
    values = _up(inputs, step_input)
    grid = _up(outputs // vector, step_output)
    target = MULTIPROCESSORS * (THREADS_A_MULTIPROCESSOR // (width * height))
    if values < MAX_VALUES or grid > target:
        return _NONE
    blocks = min(max(_up(target, grid), _up(values, MAX_VALUES)), _up(values, MIN_VALUES))
    if blocks <= 1:
        return _NONE
    size = max(4, result.element_size()) * outputs * blocks
    return (size if together else size * width * vector, 4 * grid)


def _last_goes(source: torch.Tensor, result: torch.Tensor) -> bool:
    return result.dim() == 0 or result.shape[-1] != source.shape[-1]


def _block(inputs: int, outputs: int, together: bool, source: torch.Tensor) -> tuple[int, int, int]:
    vector = 1
    first, second = (inputs, outputs) if together else (outputs, inputs)
    if together and first >= 128:
        first //= 4
    elif not together:
        vector = next((v for v in (4, 2) if outputs % v == 0 and source.shape[-1] % v == 0), 1)
        first //= vector
    most = MAX_THREADS // vector
    first_power, second_power = _power(min(first, most)), _power(min(second, most))
    width = min(first_power, WARP)
    height = min(second_power, most // width)
    return min(first_power, most // height), height, vector


def _power(n: int) -> int:
    return 1 << (max(1, n).bit_length() - 1)


def _up(a: int, b: int) -> int:
    return -(-a // b)
