"""Gives memory back, from inside of the program, and says how much that was."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.client.allocator.attached import attached, no_cuda
from gpumem_exporter.client.allocator.torch_access import Allocator
from gpumem_exporter.client.log import log
from gpumem_exporter.client.sizes import human_bytes

__all__ = ["DeepClean", "Rung", "clean_start", "clear_cache", "deep_clean", "reset_peak", "set_memory_fraction"]


@dataclass(frozen=True, slots=True)
class Rung:
    """One step of a deep clean."""

    name: str
    """`garbage`, `ipc_handles`, `cublas_workspaces`, `cache`, `pinned_host_cache`."""
    freed_bytes: int | None = None
    """`garbage`, `ipc_handles`, `cublas_workspaces`: of tensors, which goes to the cache. `cache`: of reserved memory,
    which goes to the driver. `pinned_host_cache`: of the host's memory. None where it was not done."""
    duration_seconds: float = 0.0
    reason: str = ""
    """Why it was not done."""


@dataclass(frozen=True, slots=True)
class DeepClean:
    """What a deep clean has freed, rung by rung. Prints as a table."""

    rungs: tuple[Rung, ...] = ()

    @property
    def freed_bytes(self) -> int:
        """What went back to the driver, on all devices of the process."""
        return sum(rung.freed_bytes or 0 for rung in self.rungs if rung.name == "cache")

    def __str__(self) -> str:
        if not self.rungs:
            return "no CUDA"
        return "\n".join(
            f"{rung.name:<18} {human_bytes(rung.freed_bytes):>9}{f'  {rung.reason}' if rung.reason else ''}"
            for rung in self.rungs
        )


def clear_cache(*, collect_garbage: bool = False, synchronize: bool = False) -> int:
    """Give all cached memory of this process that is in no tensor back to the driver. Returns the bytes freed.

    Of all its devices: PyTorch has no other way. It waits for memory that is pending on another stream, and each
    segment's `cudaFree` may wait for kernels that run; what is needed again is then allocated anew. So this is for a
    change of phase (before an evaluation, beside another process), not for each step. While a CUDA graph is being
    captured nothing is done, since that would break the capture.

    Args:
        collect_garbage: run Python's garbage collector first: tensors in reference cycles count as used otherwise.
        synchronize: wait for the devices' work first, so that what it uses can go, too.
    """
    allocator = attached()
    if allocator is None:
        no_cuda("clear_cache")
        return 0
    if _capturing(allocator, "clear_cache"):
        return 0
    if collect_garbage:
        gc.collect()
    if synchronize:
        _synchronize(allocator)
    return _freed(allocator, allocator.empty_cache, _returned)


def _may_have_graphs(torch: Any) -> bool:
    """There is a private pool, as every CUDA graph has one; or nobody can say."""
    try:
        segments = torch.cuda.memory_snapshot()
    except (AttributeError, RuntimeError):
        return True
    return any(tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0) for segment in segments)


def deep_clean() -> DeepClean:
    """Free all that this process holds and does not use, and say what each rung freed.

    Garbage (tensors in reference cycles), handles of memory that other processes no longer use, cuBLAS' workspaces
    where PyTorch keeps them, the cache of all devices, the cache of pinned host memory. Takes as long as a garbage
    collection and a `cudaFree` for each segment; the next steps allocate anew. Call it where no step runs.
    """
    allocator = attached()
    if allocator is None:
        no_cuda("deep_clean")
        return DeepClean()
    if _capturing(allocator, "deep_clean"):
        return DeepClean()
    torch = sys.modules["torch"]
    c = torch._C
    rungs = (
        _rung(allocator, "garbage", gc.collect, _held),
        _rung(allocator, "ipc_handles", torch.cuda.ipc_collect, _held),
        # A captured graph has the workspace's address in it, wherever that was allocated.
        _rung(
            allocator,
            "cublas_workspaces",
            None if _may_have_graphs(torch) else getattr(c, "_cuda_clearCublasWorkspaces", None),
            _held,
        ),
        _rung(allocator, "cache", allocator.empty_cache, _returned),
        _rung(allocator, "pinned_host_cache", getattr(c, "_host_emptyCache", None), _pinned),
    )
    return DeepClean(rungs)


def clean_start() -> None:
    """`deep_clean` where CUDA is initialised; silent where it is not. Raises nothing."""
    try:
        if attached() is not None:
            deep_clean()
    except Exception as error:  # noqa: BLE001 - a program that wants to be reported wants to run first of all
        log.warning("no clean start: %r", error)


def reset_peak() -> None:
    """Let the peaks of every device of this process begin anew at the present values.

    They are everybody's: `torch.cuda.max_memory_allocated()` shows it, too. Reports tell that they were reset.
    """
    allocator = attached()
    if allocator is None:
        no_cuda("reset_peak")
        return
    for index in allocator.devices():
        allocator.reset_peak(index)


def set_memory_fraction(fraction: float, device: int | None = None) -> None:
    """Let PyTorch reserve no more than this share of a device from now on.

    It limits growth alone: what is reserved stays, and the next segment beyond the limit empties the cache and then
    fails as out of memory. Context and libraries such as NCCL do not count.

    Args:
        fraction: from 0 to 1.
        device: its index; the current one by default.

    Raises:
        ValueError: the fraction is none.
    """
    if not 0 <= fraction <= 1:
        raise ValueError(f"a fraction lies between 0 and 1, not at {fraction}")
    if attached() is None:
        no_cuda("set_memory_fraction")
        return
    cuda = sys.modules["torch"].cuda
    cuda.set_per_process_memory_fraction(float(fraction), cuda.current_device() if device is None else device)


def _capturing(allocator: Allocator, what: str) -> bool:
    if allocator.capturing:
        log.warning("%s: a CUDA graph is being captured, nothing is done", what)
        return True
    return False


def _synchronize(allocator: Allocator) -> None:
    cuda = sys.modules["torch"].cuda
    for index in allocator.devices():
        cuda.synchronize(index)


def _rung(
    allocator: Allocator, name: str, action: Callable[[], Any] | None, measure: Callable[[Allocator], int | None]
) -> Rung:
    if action is None:
        return Rung(name, reason="this PyTorch has no such function")
    begun = time.perf_counter()
    try:
        freed = _freed(allocator, action, measure)
    except Exception as error:  # noqa: BLE001 - an allocator may lack it; the other rungs can do without
        return Rung(name, reason=f"{type(error).__name__}: {error}"[:200])
    return Rung(name, freed, time.perf_counter() - begun)


def _freed(allocator: Allocator, action: Callable[[], Any], measure: Callable[[Allocator], int | None]) -> int:
    before = measure(allocator)
    action()
    after = measure(allocator)
    return max(0, before - after) if before is not None and after is not None else 0


def _returned(allocator: Allocator) -> int | None:
    """Falls by what is given back: the counter of freed reserved bytes, negative, so that new segments do not hide it.

    Where there is no such counter (cudaMallocAsync), what is reserved.
    """
    left = 0
    for index in allocator.devices():
        reserved = (allocator.state(index) or {}).get("reserved_bytes", {}).get("all", {})
        left += -reserved["freed"] if "freed" in reserved else reserved.get("current", 0)
    return left


def _held(allocator: Allocator) -> int | None:
    """In tensors, on all devices."""
    held = 0
    for index in allocator.devices():
        held += (allocator.state(index) or {}).get("allocated_bytes", {}).get("all", {}).get("current", 0)
    return held


def _pinned(allocator: Allocator) -> int | None:
    return allocator.pinned_host_bytes()
