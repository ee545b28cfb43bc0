"""The one module that touches torch, and only a torch that the program has imported and initialised itself.

Every capability degrades alone: an allocator that lacks one (cudaMallocAsync, a pluggable one, an older torch) leaves
that figure None. Nothing here imports torch, initialises CUDA or creates a context.

Statistics come from `torch._C._cuda_memoryStats(device)` (10 µs, against 89 for `torch.cuda.memory_allocated`, which
builds and sorts a flat dictionary). It locks the allocator's mutex while it holds the GIL: a call that meets another
thread's cache flush waits for it, and the interpreter with it. Hence `Sampler` prefers the training thread.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpumem_exporter.client.allocator.captures import Captures
from gpumem_exporter.client.allocator.heap import LARGE_PAGE_BYTES, Heap, read_heaps
from gpumem_exporter.client.allocator.reclaimable import DeviceState, Reclaimable, known
from gpumem_exporter.client.hooks.out_of_memory import OutOfMemoryObserver
from gpumem_exporter.client.measure.observed import Observed, process_observed
from gpumem_exporter.errors import CommandRefusedError
from gpumem_exporter.wire.protocol import DeviceSample

__all__ = ["Allocator", "DeviceState"]

_MANY_POOLS = 32
"""Torch never forgets a dead private pool; with more than this, the statistics that list them are not asked for."""
_LARGE_PAGE_SETTING = "large_segment_size_mb"
_ASYNC_FIGURES = ("allocated_bytes", "reserved_bytes", "active_bytes")
"""All that the cudaMallocAsync backend fills in; the rest of its statistics is a constant 0."""


class Allocator:
    """PyTorch's caching allocator in this process.

    One thread at a time, except where a method says that any may call it. `attach` makes one.
    """

    def __init__(self, torch: Any, observed: Observed | None = None) -> None:
        self._torch = torch
        self._c = torch._C
        self._uuids: dict[int, str] = {}
        self._many_pools: set[int] = set()
        self._observed = observed or Observed()
        self._captures = Captures(getattr(self._c, "_cuda_isCurrentStreamCapturing", lambda: False))
        self._stop_watching = self._captures.watch()
        self.torch_version = str(getattr(torch, "__version__", ""))
        backend = getattr(torch.cuda, "get_allocator_backend", None)
        self._backend = backend() if backend is not None else "native"
        self._large_pages = {_large_page(_environment_settings()) or LARGE_PAGE_BYTES}
        self._seen_settings = ""
        self._reclaimable = Reclaimable(
            self._walk,
            self._captures.version,
            expandable_from_the_start="expandable_segments:true" in self._notice_settings().lower(),
        )

    @classmethod
    def attach(cls) -> Allocator | None:
        """The allocator, once the program has initialised CUDA; None before, and in a forked child of such a program.

        The guard is `torch.cuda.is_initialized()`, which knows forked children: the raw calls answer there with the
        parent's bytes, or never.
        """
        torch = sys.modules.get("torch")
        cuda = getattr(torch, "cuda", None)
        initialised = getattr(cuda, "is_initialized", None)
        return cls(torch, process_observed()) if initialised is not None and initialised() else None

    @property
    def settings(self) -> str:
        """The allocator's settings as torch tells them: what the environment says, or what was last set since.

        Before torch 2.10, which tells them, what the environment asked for.
        """
        try:
            return str(self._c._accelerator_getAllocatorSettings())
        except (AttributeError, RuntimeError):
            return _environment_settings()

    @property
    def capturing(self) -> bool:
        """A CUDA graph is being captured in a thread of this process (see `Captures`)."""
        return self._captures.under_way

    @property
    def flushing(self) -> bool:
        """Another thread is emptying the cache: whoever asks for statistics waits for it, with the GIL.

        Known of `empty_cache()` alone. The flush before an allocation's last try looks like any operation.
        """
        codes = {
            getattr(getattr(sys.modules.get(name), "empty_cache", None), "__code__", None)
            for name in ("torch.cuda.memory", "torch.accelerator.memory")
        }
        return any(frame.f_code in codes for frame in sys._current_frames().values())

    def observe_ooms(self, observer: OutOfMemoryObserver) -> bool:
        """Have the observer called at each out-of-memory error, for ever; False where this allocator cannot."""
        try:
            self._c._cuda_attach_out_of_memory_observer(observer)
        except (AttributeError, RuntimeError):
            return False
        return True

    def detach(self) -> None:
        """Remove the hooks on graph captures."""
        self._stop_watching()

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
        """The device's statistics now; None from an allocator that keeps none. Any thread may ask.

        `private_pools_bytes` is added, where they tell it.
        """
        try:
            if index in self._many_pools:
                return dict(self._c._accelerator_getDeviceStats(index))
            state: dict[str, Any] = self._c._cuda_memoryStats(index)
        except (AttributeError, RuntimeError):
            return None
        if self._backend == "cudaMallocAsync":
            return {
                name: {"all": {metric: state[name]["all"][metric] for metric in ("current", "peak")}}
                for name in _ASYNC_FIGURES
            }
        pools = state.get("reserved_bytes_by_private_pools")  # 2.13 and later
        if pools is not None:
            state["private_pools_bytes"] = _current_sum(pools)
            if len(pools) > _MANY_POOLS and hasattr(self._c, "_accelerator_getDeviceStats"):
                self._many_pools.add(index)
        return state

    def samples(self) -> tuple[DeviceSample, ...]:
        """One sample of each device that this process uses and that can be named."""
        self._notice_settings()
        states = {index: self._observed.look(index, self.state) for index in self.devices() if self.uuid(index)}
        told = {index: state for index, state in states.items() if state is not None}
        self._reclaimable.look(told)
        return tuple(self._sample(index, state) for index, state in states.items())

    def sample_now(self, index: int) -> DeviceSample:
        """One device's sample without a walk over the heap; unlike the rest, any thread may call this."""
        return self._sample(index, self.state(index))

    def sample_at_oom(self, index: int) -> DeviceSample:
        """The same in an out-of-memory observer: what torch could give back it has given back before it calls one.

        But not while a graph is captured: it keeps its cache then.
        """
        state = self.state(index)
        sample = self._sample(index, state)
        if state is None or self._reclaimable.told_by_statistics(index, state):
            return sample
        return replace(sample, reclaimable_bytes=None if self.capturing or sample.reserved_bytes is None else 0)

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
        self._observed.reset_peaks(index, self.state, self._c._cuda_resetPeakMemoryStats)

    def total_bytes(self, index: int) -> int:
        """The device's memory as CUDA gives it: what a memory fraction is a fraction of."""
        total: int = self._torch.cuda.get_device_properties(index).total_memory
        return total

    def set_memory_fraction(self, index: int, fraction: float) -> None:
        """Let the allocator reserve no more than that share of the device from now on; gives nothing back."""
        self._torch.cuda.set_per_process_memory_fraction(fraction, index)

    def allocations(self, index: int) -> tuple[int, int] | None:
        """How many blocks were ever handed out and taken back on a device; None where that is not counted."""
        counted = (self.state(index) or {}).get("allocation", {}).get("all", {})
        return (counted["allocated"], counted["freed"]) if counted else None

    def snapshot(self) -> dict[str, Any]:
        """All segments, blocks and traces, as `torch.cuda.memory._snapshot` gives them: what memory_viz reads.

        Raises:
            CommandRefusedError: this allocator keeps no books of blocks.
        """
        try:
            taken: dict[str, Any] = self._torch.cuda.memory._snapshot()
        except (AttributeError, RuntimeError) as error:
            raise CommandRefusedError(f"this allocator gives no snapshot: {error}") from None
        return taken

    def _notice_settings(self) -> str:
        settings = self.settings
        if settings != self._seen_settings:
            self._seen_settings = settings
            page = _large_page(settings)
            if page is not None:
                self._large_pages.add(page)
        return settings

    def _walk(self) -> Mapping[int, Heap] | None:
        try:
            snapshot = self._torch.cuda.memory_snapshot
            # traces (2.11 and later can leave them out) may be hundreds of thousands of entries
            segments = snapshot(include_traces=False) if "include_traces" in _parameters(snapshot) else snapshot()
        except (AttributeError, RuntimeError):
            return None
        # None comes alive again: what is dead after the snapshot may at most have been alive in it.
        heaps = read_heaps(segments, large_pages=self._large_pages, dead_pools=self._captures.dead_pools())
        self._captures.keep_only({tuple(segment.get("segment_pool_id", ())) for segment in segments})
        return heaps

    def _sample(self, index: int, state: DeviceState | None) -> DeviceSample:
        uuid = self.uuid(index)
        if state is None:
            return DeviceSample(uuid)
        private = state.get("private_pools_bytes")
        segments = state.get("segment", {}).get("all", {})
        return DeviceSample(
            uuid=uuid,
            allocated_bytes=known(state, "allocated_bytes"),
            reserved_bytes=known(state, "reserved_bytes"),
            active_bytes=known(state, "active_bytes"),
            inactive_split_bytes=known(state, "inactive_split_bytes"),
            requested_bytes=known(state, "requested_bytes"),
            allocated_peak_bytes=self._observed.lifted(
                index, "allocated_bytes", known(state, "allocated_bytes", "peak")
            ),
            reserved_peak_bytes=self._observed.lifted(index, "reserved_bytes", known(state, "reserved_bytes", "peak")),
            private_pools_bytes=self._reclaimable.private_bytes(index, state) if private is None else private,
            reclaimable_bytes=self._reclaimable.bytes(index, state),
            alloc_retries=state.get("num_alloc_retries"),
            ooms=state.get("num_ooms"),
            segments_allocated=segments.get("allocated"),
            segments_freed=segments.get("freed"),
            cache_flushes=state.get("num_sync_all_streams"),
            peak_resets=None if known(state, "allocated_bytes", "peak") is None else self._observed.peak_resets(index),
            phase_peak_bytes={name: peak.at_least_bytes for name, peak in self._observed.phases(index).items()},
            component_bytes=self._observed.components(index),
        )


def _current_sum(pools: Mapping[Any, Any]) -> int:
    return sum(pool["all"]["current"] for pool in pools.values())


def _parameters(function: Callable[..., Any]) -> Iterator[str]:
    code = getattr(function, "__code__", None)
    return iter(code.co_varnames[: code.co_argcount] if code is not None else ())


def _environment_settings() -> str:
    """What the environment says: the older name wins, even when it is empty (CUDAAllocatorConfig.h)."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", os.environ.get("PYTORCH_ALLOC_CONF", ""))


def _large_page(settings: str) -> int | None:
    """The page size that they give to expandable segments of the large pool, in bytes (2.10 and later)."""
    for setting in settings.replace(" ", "").split(","):
        name, _, value = setting.partition(":")
        if name == _LARGE_PAGE_SETTING and value.isdigit():
            return int(value) << 20
    return None
