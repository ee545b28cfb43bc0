"""The one module that touches torch, and only a torch that the program has imported and initialised itself.

Every capability degrades alone: an allocator that lacks one (cudaMallocAsync, a pluggable one, an older torch) leaves
that figure None. Nothing here imports torch, initialises CUDA or creates a context.

Statistics come from `torch._C._cuda_memoryStats(device)` (10 µs, against 89 for `torch.cuda.memory_allocated`, which
builds and sorts a flat dictionary). It locks the allocator's mutex while it holds the GIL: a call that meets another
thread's cache flush waits for it, and the interpreter with it. Hence `Sampler` prefers the training thread.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpumem_exporter.client._heap import returnable_bytes
from gpumem_exporter.protocol import DeviceSample

__all__ = ["Allocator", "DeviceState"]

DeviceState = dict[str, Any]
"""One device's nested statistics, as torch gives them."""

_WALK_SHARE = 2000
"""A walk over the heap that took t seconds is not repeated before 2000 t have passed: 0.05 % of a core."""
_WALK_BLOCKS_MAX = 50_000
"""A heap with more blocks is not walked: it would stop the interpreter for tens of milliseconds."""
_MANY_POOLS = 32
"""Torch never forgets a dead private pool; with this many, the statistics that list them are asked for rarely."""
_MANY_POOLS_SECONDS = 10.0


class Allocator:
    """PyTorch's caching allocator in this process.

    One thread at a time, except `capturing`, which any may read. `attach` makes one.
    """

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self._c = torch._C
        self._uuids: dict[int, str] = {}
        self._unreturnable: dict[int, int] = {}
        self._walked_at: tuple[Any, ...] = ()
        self._next_walk_seconds = 0.0
        self._pools: dict[int, tuple[float, int | None]] = {}
        self._captures = 0
        self._removers: list[Callable[[], None]] = []
        self.torch_version = str(getattr(torch, "__version__", ""))
        self.settings = _allocator_settings(self._c)
        self._expandable = "expandable_segments:true" in self.settings.lower()
        self._watch_captures()

    @classmethod
    def attach(cls) -> Allocator | None:
        """The allocator, once the program has initialised CUDA; None before, and in a forked child of such a program.

        The guard is `torch.cuda.is_initialized()`, which knows forked children: the raw calls answer there with the
        parent's bytes, or never.
        """
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        initialised = getattr(cuda, "is_initialized", None)
        return cls(torch) if initialised is not None and initialised() else None

    @property
    def capturing(self) -> bool:
        """A CUDA graph is being captured somewhere in this process.

        Known from torch 2.14 on, which has hooks for it; before, only the calling thread's stream can be asked.
        """
        if self._captures > 0:
            return True
        asked = getattr(self._c, "_cuda_isCurrentStreamCapturing", None)
        return bool(asked()) if asked is not None else False

    def after_each_step(self, callback: Callable[[Any], None]) -> bool:
        """Have `callback(optimizer)` called after each step of any optimizer; False if this torch cannot."""
        optimizers = sys.modules.get("torch.optim.optimizer")
        register = getattr(optimizers, "register_optimizer_step_post_hook", None)
        if register is None:
            return False
        self._removers.append(register(lambda optimizer, _args, _kwargs: callback(optimizer)).remove)
        return True

    def detach(self) -> None:
        """Take every hook out of torch again."""
        while self._removers:
            with contextlib.suppress(Exception):
                self._removers.pop()()

    def devices(self) -> list[int]:
        """The indices of the devices on which this process has a context: the only ones it can hold memory on."""
        has_context = self._c._cuda_hasPrimaryContext
        return [index for index in range(self._torch.cuda.device_count()) if has_context(index)]

    def uuid(self, index: int) -> str:
        """The device's UUID as NVML spells it; empty where torch does not say (before 2.5).

        `cudaDeviceProp` says it right under any CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER.
        """
        known = self._uuids.get(index)
        if known is None:
            properties = self._torch.cuda.get_device_properties(index)
            raw = str(getattr(properties, "uuid", ""))
            prefix = "MIG-" if "MIG" in str(properties.name).split() else "GPU-"
            known = self._uuids[index] = prefix + raw if raw else ""
        return known

    def state(self, index: int) -> DeviceState | None:
        """The device's statistics now; None from an allocator that keeps none."""
        try:
            stats: DeviceState = self._c._cuda_memoryStats(index)
        except (AttributeError, RuntimeError):
            return None
        return stats

    def samples(self) -> tuple[DeviceSample, ...]:
        """One sample of each device that this process uses and that can be named."""
        states = [(index, self._cheap_state(index)) for index in self.devices() if self.uuid(index)]
        returnable = self._returnable(states)
        return tuple(self._sample(index, state, returnable.get(index)) for index, state in states)

    def pinned_host_bytes(self) -> int | None:
        """Pinned host memory that torch's caching host allocator holds (2.7 and later)."""
        try:
            held: int = self._c._cuda_hostMemoryStats()["allocated_bytes"]["current"]
        except (AttributeError, RuntimeError, KeyError):
            return None
        return held

    def free_bytes(self, index: int) -> int | None:
        """The device's free memory as `cudaMemGetInfo` gives it, for a device with a context."""
        try:
            free: int = self._torch.cuda.cudart().cudaMemGetInfo(index)[0]
        except RuntimeError:
            return None
        return free

    def empty_cache(self) -> None:
        """Give every wholly free segment of every device back to the driver; waits for pending cross-stream frees."""
        self._torch.cuda.empty_cache()

    def reset_peak(self, index: int) -> None:
        """Let the peaks of one device begin anew at the present values."""
        self._c._cuda_resetPeakMemoryStats(index)

    def _cheap_state(self, index: int) -> DeviceState | None:
        now = time.monotonic()
        asked_seconds, pools = self._pools.get(index, (0.0, None))
        if asked_seconds and now - asked_seconds < _MANY_POOLS_SECONDS:
            state: DeviceState = dict(self._c._accelerator_getDeviceStats(index))
            state["private_pools_bytes"] = pools
            return state
        asked = self.state(index)
        if asked is None:
            return None
        listed = asked.get("reserved_bytes_by_private_pools")
        live = None if listed is None else sum(pool["all"]["current"] for pool in listed.values())
        asked["private_pools_bytes"] = live
        if listed is not None and len(listed) > _MANY_POOLS and hasattr(self._c, "_accelerator_getDeviceStats"):
            self._pools[index] = (now, live)
        return asked

    def _returnable(self, states: list[tuple[int, DeviceState | None]]) -> dict[int, int]:
        """What a clear would return, by device, where the statistics alone do not say it."""
        complex_heaps = {
            index: state
            for index, state in states
            if state is not None
            and _known(state, "active_bytes") is not None
            and (state["private_pools_bytes"] or self._expandable)
        }
        if not complex_heaps:
            return {}
        heap = tuple(_heap_version(state) for state in complex_heaps.values())
        now = time.monotonic()
        blocks = sum(state.get("active", {}).get("all", {}).get("current", 0) for state in complex_heaps.values())
        if heap != self._walked_at and now >= self._next_walk_seconds and blocks <= _WALK_BLOCKS_MAX:
            segments = self._walk()
            if segments is None:
                return {}
            returnable = returnable_bytes(segments)
            self._unreturnable = {
                index: _unused(state) - returnable.get(index, 0) for index, state in complex_heaps.items()
            }
            self._walked_at = heap
            taken = time.monotonic() - now
            self._next_walk_seconds = now + taken * _WALK_SHARE
        return {
            index: max(0, _unused(state) - self._unreturnable[index])
            for index, state in complex_heaps.items()
            if index in self._unreturnable
        }

    def _walk(self) -> Any | None:
        try:
            snapshot = self._torch.cuda.memory_snapshot
            # traces (2.11 and later can leave them out) may be hundreds of thousands of entries
            return snapshot(include_traces=False) if "include_traces" in _parameters(snapshot) else snapshot()
        except RuntimeError:
            return None

    def _sample(self, index: int, state: DeviceState | None, returnable: int | None) -> DeviceSample:
        uuid = self.uuid(index)
        if state is None:
            return DeviceSample(uuid)
        allocated = _known(state, "allocated_bytes")
        reserved = _known(state, "reserved_bytes")
        if returnable is None and not state["private_pools_bytes"] and not self._expandable:
            # Classic segments in the default pool: exact. Elsewhere only a walk tells.
            active, split = _known(state, "active_bytes"), _known(state, "inactive_split_bytes")
            if reserved is not None and active is not None and split is not None:
                returnable = reserved - active - split
        segments = state.get("segment", {}).get("all", {})
        return DeviceSample(
            uuid=uuid,
            allocated_bytes=allocated,
            reserved_bytes=reserved,
            active_bytes=_known(state, "active_bytes"),
            inactive_split_bytes=_known(state, "inactive_split_bytes"),
            requested_bytes=_known(state, "requested_bytes"),
            allocated_peak_bytes=_known(state, "allocated_bytes", "peak"),
            reserved_peak_bytes=_known(state, "reserved_bytes", "peak"),
            private_pools_bytes=state["private_pools_bytes"],
            reclaimable_bytes=returnable,
            alloc_retries=state.get("num_alloc_retries"),
            ooms=state.get("num_ooms"),
            segments_allocated=segments.get("allocated"),
            segments_freed=segments.get("freed"),
            cache_flushes=state.get("num_sync_all_streams"),
        )

    def _watch_captures(self) -> None:
        """Count graph captures under way; torch swallows what these hooks raise, and runs them on any thread."""
        graphs = sys.modules.get("torch.cuda.graphs")
        for name, change in (("start", 1), ("end", -1)):
            register = getattr(graphs, f"register_graph_capture_{name}_hook", None)
            if register is not None:
                self._removers.append(register(self._capture_counter(change)).remove)

    def _capture_counter(self, change: int) -> Callable[[Any], None]:
        def count(_graph: Any) -> None:
            self._captures = max(0, self._captures + change)

        return count


def _known(state: DeviceState, name: str, metric: str = "current") -> int | None:
    value: int | None = state.get(name, {}).get("all", {}).get(metric)
    return value


def _unused(state: DeviceState) -> int:
    """Reserved bytes in no block that is in use or still pending on a stream."""
    return int(state["reserved_bytes"]["all"]["current"]) - int(state["active_bytes"]["all"]["current"])


def _heap_version(state: DeviceState) -> tuple[int, ...]:
    """Changes whenever a block was taken or given back: two equal versions are one heap."""
    return tuple(
        state[name]["all"][metric]
        for name in ("active_bytes", "reserved_bytes")
        for metric in ("current", "allocated", "freed")
    )


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    code = getattr(function, "__code__", None)
    return iter(code.co_varnames[: code.co_argcount] if code is not None else ())


def _allocator_settings(c: Any) -> str:
    """The allocator's settings in force; before torch 2.10, which tells them, what the environment asked for."""
    try:
        return str(c._accelerator_getAllocatorSettings())
    except (AttributeError, RuntimeError):
        # With both set, the older name wins (CUDAAllocatorConfig.h).
        return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF", "")
