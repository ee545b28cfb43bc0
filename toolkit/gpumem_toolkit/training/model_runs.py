"""Calls a model, and measures a run: its time, its results, and its peak from the history of its allocations."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from gpumem_client.allocator.reclaimable import known
from gpumem_client.phases.measured import DeviceUse, Measured, MemoryUse
from gpumem_client.torch_access import DeviceState, Statistics, recorded_history
from gpumem_client.wire.errors import ConfigurationError


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a tensor, positional arguments in a tuple or list, or keyword arguments in a mapping."""
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode within the block, and restore the mode of each part."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def check_autocast(dtype: torch.dtype | None) -> None:
    """Reject dtypes that autocast does not support."""
    # Torch only warns and disables autocast.
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ConfigurationError(f"invalid autocast {dtype}: use torch.bfloat16, torch.float16 or None")


def autocasting(model: nn.Module, dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Return `torch.autocast` for the model's device; without a dtype, a context that does nothing."""
    if dtype is None:
        return nullcontext()
    tensor = next(itertools.chain(model.parameters(), model.buffers()), None)
    return torch.autocast("cpu" if tensor is None else tensor.device.type, dtype)


def run_seconds(run: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of one run, including the device's work."""
    synchronize(device)
    started = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for a CUDA device; do nothing for another one."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def distance_ratio(kept: Tensor, tensor: Tensor) -> float:
    """Return the distance of a tensor from `kept`, divided by the norm of `kept`. Both are on the CPU."""
    before = kept.to(torch.float64).flatten()
    size, distance = float(before.norm()), float((tensor.to(torch.float64).flatten() - before).norm())
    if not distance:
        return 0.0
    return distance / size if size else math.inf


# A run with a longer history, of about 60,000 allocations, is not measured by it.
_ENTRIES_MAX = 200_000
_ROUNDING = 512


def measure_peak(
    run: Callable[[], object], device: torch.device, *, reset_peaks: bool
) -> tuple[int | None, int | None]:
    """Run once, and return the bounds of the peak above the allocated bytes before; None where they are unknown.

    Without CUDA it does not run. The history is not available with cudaMallocAsync, with a pluggable allocator, and
    while the user's code records its own. Then the peaks have the bounds that `gpumem_client.phase` gives.
    `reset_peaks` resets the allocator's peaks instead, so that the peak is exact.
    """
    if device.type != "cuda":
        return None, None
    index = torch.cuda.current_device() if device.index is None else device.index
    statistics = Statistics(torch)
    with nullcontext() if reset_peaks else recorded_history(torch, _ENTRIES_MAX) as history:
        before = statistics.state(index)
        with Measured("peak", kept=False, reset_peaks=reset_peaks) as use:
            run()
        after = statistics.state(index)
        entries = [] if history is None else history(index)
    measured = use_on(use, device)
    if measured is None:
        return None, None
    least: int = measured.peak_bytes - measured.before_bytes
    most = None if measured.peak_at_most_bytes is None else measured.peak_at_most_bytes - measured.before_bytes
    bounds = _bounds(entries, _grown(before, after, "allocated"), _grown(before, after, "freed"))
    if bounds is None or least == most:
        return least, most
    return max(least, bounds[0]), bounds[1] if most is None else min(most, bounds[1])


def use_on(use: MemoryUse, device: torch.device) -> DeviceUse | None:
    """Return the memory use on a device; None without CUDA."""
    return next((each for each in use.devices if device.type == "cuda" and each.index == device.index), None)


def _grown(before: DeviceState | None, after: DeviceState | None, metric: str) -> int | None:
    """Return how much a counter of bytes has grown; None if the allocator does not have it."""
    one, other = known(before, "allocated_bytes", metric), known(after, "allocated_bytes", metric)
    return None if one is None or other is None else other - one


def _bounds(
    entries: Sequence[dict[str, Any]], allocated_bytes: int | None, freed_bytes: int | None
) -> tuple[int, int] | None:
    """Return the bounds of the peak above the start; None if the history does not have all entries.

    The history has the oldest entry first. The bytes are what the allocator counts as allocated and freed meanwhile.
    """
    if not 0 < len(entries) < _ENTRIES_MAX or allocated_bytes is None or freed_bytes is None:
        return None
    # The history has the requested sizes. The allocator may allocate more: it does not split a block that is only a
    # little larger than the request. Its counters of allocated and freed bytes show how much more it allocated. If that
    # is zero, the peak is exact.
    live: set[int] = set()
    now = peak = 0
    frees_older = False
    for entry in entries:
        size = -(-entry["size"] // _ROUNDING) * _ROUNDING
        if entry["action"] == "alloc":
            now, allocated_bytes = now + size, allocated_bytes - size
            live.add(entry["addr"])
        elif entry["action"] == "free_requested":
            now, freed_bytes = now - size, freed_bytes - size
            frees_older = frees_older or entry["addr"] not in live
            live.discard(entry["addr"])
        peak = max(peak, now)
    if allocated_bytes < 0 or freed_bytes < 0:
        return None
    return peak - freed_bytes * frees_older, peak + allocated_bytes
