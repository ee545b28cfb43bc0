"""Releases memory within the user's process, and measures how much."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumem_client import torch_access
from gpumem_client.allocator.allocator import Allocator, attached
from gpumem_client.allocator.reclaimable import known
from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.hooks.graph_captures import process_captures
from gpumem_client.wire.units import ShownAsText, human_bytes


@dataclass(frozen=True)
class Rung:
    """One step of a deep clean."""

    name: str
    """`garbage`, `ipc_handles`, `cublas_workspaces`, `cache`, `pinned_host_cache`."""
    freed_bytes: int | None = None
    """`garbage`, `ipc_handles`, `cublas_workspaces`: allocated bytes, which move to the cache. `cache`: reserved bytes,
    which return to the driver. `pinned_host_cache`: bytes of host memory. None if the step was not done."""
    duration_seconds: float = 0.0
    reason: str = ""
    """The reason why the step was not done."""


@dataclass(frozen=True)
class DeepClean(ShownAsText):
    """The bytes that each step of a deep clean has freed. Prints as a table."""

    rungs: tuple[Rung, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """Bytes that returned to the driver, on all devices of the process."""
        return sum(rung.freed_bytes or 0 for rung in self.rungs if rung.name == "cache")

    def __str__(self) -> str:
        if not self.rungs:
            return "no CUDA"
        return "\n".join(
            f"{rung.name:<18} {human_bytes(rung.freed_bytes):>9}{f'  {rung.reason}' if rung.reason else ''}"
            for rung in self.rungs
        )


def clear_cache(*, collect_garbage: bool = False, synchronize: bool = False) -> int:
    """Release the cached memory of all devices of this process to the driver. Returns the bytes freed.

    The call waits for memory that is pending on another stream, and each segment's `cudaFree` may wait for running
    kernels. The next steps allocate their memory from the driver again. So call this between phases, for example before
    an evaluation, and not in each step. While a CUDA graph is being captured nothing is done, because a release would
    break the capture.

    Args:
        collect_garbage: run Python's garbage collector first, which frees tensors in reference cycles.
        synchronize: wait for the devices first, so that memory in use by running kernels can be released, too.
    """
    allocator = attached("clear_cache")
    if allocator is None:
        return 0
    with process_captures().no_start() as quiet:
        if _capturing(allocator, quiet, "clear_cache"):
            return 0
        if collect_garbage:
            gc.collect()
        if synchronize:
            for index in allocator.devices():
                sys.modules["torch"].cuda.synchronize(index)
        return _freed(allocator, allocator.empty_cache, _returned_bytes)


def deep_clean() -> DeepClean:
    """Free all memory that this process has and does not use, and return what each step freed.

    The steps are: garbage (tensors in reference cycles), handles of memory that other processes no longer use, the
    workspaces that PyTorch keeps for cuBLAS, the cache of all devices, and the cache of pinned host memory. This takes
    as long as a garbage collection and one `cudaFree` per segment. Call it when no step runs.
    """
    allocator = attached("deep_clean")
    if allocator is None:
        return DeepClean()
    with process_captures().no_start() as quiet:
        return DeepClean() if _capturing(allocator, quiet, "deep_clean") else _deep_clean(allocator)


def _deep_clean(allocator: Allocator) -> DeepClean:
    torch = sys.modules["torch"]
    clear_cublas, clear_pinned = torch_access.find_clears(torch)
    if _may_have_graphs(torch):  # a captured graph contains the address of its workspace, which must stay allocated
        clear_cublas = None
    # In this order: the first three move memory to the cache, which the fourth releases.
    return DeepClean(
        (
            _rung(allocator, "garbage", gc.collect, _allocated_bytes),
            _rung(allocator, "ipc_handles", torch.cuda.ipc_collect, _allocated_bytes),
            _rung(allocator, "cublas_workspaces", clear_cublas, _allocated_bytes),
            _rung(allocator, "cache", allocator.empty_cache, _returned_bytes),
            _rung(allocator, "pinned_host_cache", clear_pinned, Allocator.pinned_host_bytes),
        )
    )


@guest_safety(lambda error: log.warning("the clean start failed: %r", error))
def clean_start() -> None:
    """Run `deep_clean` if CUDA is initialized, otherwise do nothing and log nothing."""
    if attached() is not None:
        deep_clean()


def reset_peak() -> None:
    """Reset the peaks of every device of this process to the current values.

    `torch.cuda.max_memory_allocated()` reads the same peaks. Reports count the resets.
    """
    allocator = attached("reset_peak")
    if allocator is None:
        return
    for index in allocator.devices():
        allocator.reset_peak(index)


def set_memory_fraction(fraction: float, device: int | None = None) -> None:
    """Limit what PyTorch may reserve to a fraction of a device.

    The limit affects growth only. Reserved memory stays reserved, and the first segment beyond the limit empties the
    cache and then fails as out of memory. CUDA contexts and libraries such as NCCL do not count.

    Args:
        fraction: from 0 to 1.
        device: the device's index; the current device by default.

    Raises:
        ValueError: the fraction is out of range.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"invalid fraction {fraction}: expected a number from 0 to 1")
    allocator = attached("set_memory_fraction")
    if allocator is None:
        return
    index = sys.modules["torch"].cuda.current_device() if device is None else device
    allocator.set_memory_fraction(index, float(fraction))


def _capturing(allocator: Allocator, quiet: bool, function: str) -> bool:
    """Log that a function does nothing while a graph is captured; `quiet` is of `GraphCaptures.no_start`."""
    if not quiet or allocator.capturing:
        log.warning("%s: a CUDA graph is being captured, nothing is done", function)
        return True
    return False


def _may_have_graphs(torch: Any) -> bool:
    """Whether a CUDA graph may exist: each has a private pool. True if the pools are unknown."""
    try:
        segments = torch_access.snapshot_segments(torch)
    except (AttributeError, RuntimeError):
        return True
    return any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in segments)


def _rung(
    allocator: Allocator, name: str, action: Callable[[], Any] | None, measure: Callable[[Allocator], int | None]
) -> Rung:
    if action is None:
        return Rung(name, reason="this PyTorch has no such function")
    started = time.perf_counter()
    try:
        freed = _freed(allocator, action, measure)
    except Exception as error:  # noqa: BLE001 - an allocator may lack the function; the other steps do not need it
        return Rung(name, reason=f"{type(error).__name__}: {error}"[:200])
    return Rung(name, freed, time.perf_counter() - started)


def _freed(allocator: Allocator, action: Callable[[], Any], measure: Callable[[Allocator], int | None]) -> int:
    before = measure(allocator)
    action()
    after = measure(allocator)
    return max(0, before - after) if before is not None and after is not None else 0


def _returned_bytes(allocator: Allocator) -> int:
    """Return a number that falls by the bytes that are released to the driver, even if others are reserved."""
    # The negative counter of freed reserved bytes, or the reserved bytes without a counter (cudaMallocAsync).
    freed = [known(allocator.state(index), "reserved_bytes", "freed") for index in allocator.devices()]
    if None not in freed:
        return -sum(filter(None, freed))
    return sum(known(allocator.state(index), "reserved_bytes") or 0 for index in allocator.devices())


def _allocated_bytes(allocator: Allocator) -> int:
    """Return the bytes in tensors, on all devices."""
    return sum(known(allocator.state(index), "allocated_bytes") or 0 for index in allocator.devices())
