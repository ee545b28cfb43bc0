"""PyTorch's caching allocator in this process: its values, and operations such as `empty_cache`.

A value is None if the allocator does not have it (cudaMallocAsync, a pluggable allocator, an older torch).
"""

from __future__ import annotations

import functools
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpumem_client import torch_access
from gpumem_client.allocator.allocator_environment import environment_limit, in_force
from gpumem_client.allocator.components import (
    Unmapped,
    can_unmap,
    unmapped_in,
    with_cache_use,
    with_components,
    without_unmapped,
)
from gpumem_client.allocator.heap_sum import LARGE_PAGE_BYTES, Heap, read_heaps
from gpumem_client.allocator.reclaimable import Reclaimable, known
from gpumem_client.engines.engine_reader import EngineReader, process_engine
from gpumem_client.engines.engine_state import EngineFacts
from gpumem_client.guest_safety import log
from gpumem_client.hooks.graph_captures import process_captures
from gpumem_client.hooks.process_life import singletons
from gpumem_client.phases.observed import Observed, process_observed
from gpumem_client.torch_access import DeviceState
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import DeviceSample
from gpumem_client.wire.reason_codes import ReasonCode


class Allocator:
    """The allocator. Only one thread at a time may use it, except for methods that say otherwise.

    The demo's simulated processes have the same methods, as far as the reporter and its commands use them.
    """

    def __init__(self, torch: Any, observed: Observed | None = None, engine: EngineReader | None = None) -> None:
        self._torch = torch
        self._statistics = torch_access.statistics_of(torch)
        self._uuids: dict[int, str] = {}
        self._environment_limits: dict[int, int | None] = {}
        self._observed = observed or Observed(lambda: self._statistics)
        self._engine = engine or EngineReader()
        self._captures = process_captures()
        self._stop_watching = self._captures.watch()
        self.torch_version = str(getattr(torch, "__version__", ""))
        self._large_pages = {_large_page(in_force(os.environ)[1]) or LARGE_PAGE_BYTES}
        self._notice_page_size()
        self._reclaimable = Reclaimable(self._walk, self._captures.dead_pools)

    @classmethod
    def attach(cls) -> Allocator | None:
        """Return the allocator if CUDA is initialized in this process, otherwise None."""
        torch = torch_access.initialized_torch()
        return None if torch is None else cls(torch, process_observed(), process_engine())

    @property
    def settings(self) -> str:
        """The allocator's settings in force; before torch 2.10 the value of PYTORCH_CUDA_ALLOC_CONF."""
        settings = torch_access.allocator_settings(self._torch)
        return os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "") if settings is None else settings

    @property
    def capturing(self) -> bool:
        """Whether a CUDA graph is being captured in any thread of this process."""
        # The second shows a capture of this thread that started before the hook was installed.
        return bool(self._captures.running()) or torch_access.current_stream_is_capturing(self._torch)

    @property
    def flushing(self) -> bool:
        """Whether another thread runs `empty_cache()`: reading statistics would wait for it, with the GIL."""
        # Only the frames of Python show it: asking the allocator would be the wait itself. So a flush by the allocator,
        # before the last attempt of an allocation, is not recognized.
        codes = {
            getattr(getattr(sys.modules.get(name), "empty_cache", None), "__code__", None)
            for name in ("torch.cuda.memory", "torch.accelerator.memory")
        }
        return any(frame.f_code in codes for frame in sys._current_frames().values())  # noqa: SLF001

    def current_phase(self) -> str | None:
        """Return the phase in which this thread allocates. Any thread may call this."""
        return self._observed.current_phase()

    def detach(self) -> None:
        """Remove the hook on graph captures."""
        self._stop_watching()

    def devices(self) -> list[int]:
        """Return the indices of the devices on which this process has a context. Any thread may call this."""
        return self._statistics.devices()

    def uuid(self, index: int) -> str:
        """Return the device's UUID as NVML writes it; empty if neither torch nor the driver shows it."""
        uuid = self._uuids.get(index)
        if uuid is None:
            # Torch has the UUID from 2.5 on, without NVML's prefix.
            properties = self._torch.cuda.get_device_properties(index)
            raw = str(getattr(properties, "uuid", "")) or torch_access.driver_uuid(index)
            prefix = "MIG-" if "MIG" in str(properties.name).split() else "GPU-"
            uuid = self._uuids[index] = prefix + raw if raw else ""
        return uuid

    def state(self, index: int) -> DeviceState | None:
        """Return the device's statistics, or None if the allocator keeps none. Any thread may call this."""
        return self._statistics.state(index)

    def unmapped(self, index: int, state: DeviceState | None) -> Unmapped | None:
        """Return the memory in these statistics that the driver does not hold; None if unknown. Walks over no heap."""
        if state is None or not can_unmap():
            return Unmapped(0, 0)
        segments = unmapped_in(self._reclaimable.pool_segments(index, state))
        return None if segments is None else Unmapped.of(segments)

    def engine(self) -> EngineFacts | None:
        """Look for the inference engine in this process, and return what is known about it."""
        self._engine.look()
        return self._engine.read()

    def samples(self) -> tuple[DeviceSample, ...]:
        """Return a sample of each device that this process uses and that has a known UUID."""
        self._notice_page_size()
        devices = self.devices()
        states = {index: self._observed.read(index) for index in devices if self.uuid(index)}
        self._reclaimable.walk_if_due({index: state for index, state in states.items() if state is not None})
        nccl_bytes = torch_access.nccl_bytes(devices)
        return tuple(self._sample(index, state, nccl_bytes.get(index)) for index, state in states.items())

    def unused(self) -> Iterator[DeviceSample]:
        """Yield of each device only what the idle cache needs. Does not walk over the heap."""
        for index in self.devices():
            state = self.state(index) if self.uuid(index) else None
            if state is not None:
                peak = known(state, "allocated_bytes", "peak")
                yield DeviceSample(
                    uuid=self.uuid(index),
                    reserved_bytes=known(state, "reserved_bytes"),
                    allocated_peak_bytes=self._observed.lifted(index, "allocated_bytes", peak),
                    reclaimable_bytes=self._reclaimable.unused_bytes(index, state),
                    alloc_retries=state.get("num_alloc_retries"),
                    segments_freed=known(state, "segment", "freed"),
                )

    def sample_now(self, index: int) -> DeviceSample:
        """Return one device's sample without a walk over the heap. Any thread may call this."""
        return self._sample(index, self.state(index))

    def sample_at_oom(self, index: int) -> DeviceSample:
        """Return the sample for an out-of-memory observer. Any thread may call this."""
        state = self.state(index)
        sample = self._sample(index, state)
        if state is None or self._reclaimable.exact_from_statistics(index, state):
            return sample
        # A walk over the heap would delay the error, and the observer must be quick: it runs in the user's thread. No
        # walk is needed: torch releases all reclaimable memory before it calls an observer, except during a capture.
        return replace(sample, reclaimable_bytes=None if self.capturing or sample.reserved_bytes is None else 0)

    def pinned_host_bytes(self) -> int | None:
        """Return the bytes of pinned host memory that torch's host allocator keeps; None before torch 2.7."""
        return torch_access.pinned_host_bytes(self._torch)

    def free_bytes(self, index: int) -> int | None:
        """Return the device's free memory (`cudaMemGetInfo`), for a device with a context."""
        try:
            free: int = self._torch.cuda.cudart().cudaMemGetInfo(index)[0]
        except RuntimeError:
            return None
        return free

    def empty_cache(self) -> None:
        """Release every wholly free segment of every device. Waits for pending frees of other streams."""
        self._torch.cuda.empty_cache()

    def reset_peak(self, index: int) -> None:
        """Reset the peaks of one device to the current values."""
        self._observed.reset_peaks(index)

    def total_bytes(self, index: int) -> int:
        """Return the device's memory as CUDA reports it: a memory fraction is a fraction of this."""
        total: int = self._torch.cuda.get_device_properties(index).total_memory
        return total

    def set_memory_fraction(self, index: int, fraction: float) -> None:
        """Limit what the allocator may reserve to a fraction of the device; releases nothing."""
        self._torch.cuda.set_per_process_memory_fraction(fraction, index)

    def memory_limit_bytes(self, index: int) -> int | None:
        """Return the most that this process may use on a device; None if none is known. Any thread may call this."""
        try:
            fraction: float = self._torch.cuda.get_per_process_memory_fraction(index)
        except (AttributeError, RuntimeError):  # before torch 2.6, or a pluggable allocator
            fraction = 1.0
        of_fraction = int(fraction * self.total_bytes(index)) if fraction < 1 else None
        if index not in self._environment_limits:
            self._environment_limits[index] = environment_limit(os.environ, index, self.total_bytes)
        limits = (of_fraction, self._environment_limits[index])
        return min((limit for limit in limits if limit is not None), default=None)

    def allocations(self, index: int) -> tuple[int, int] | None:
        """Return how many blocks of a device were ever allocated and freed; None if they are not counted."""
        counted = (self.state(index) or {}).get("allocation", {})
        return (counted["allocated"], counted["freed"]) if counted else None

    def snapshot(self) -> dict[str, Any]:
        """Return all segments, blocks and traces, as memory_viz reads them.

        Raises:
            CommandRefusedError: this allocator has no snapshot.
        """
        try:
            return torch_access.take_snapshot(self._torch)
        except (AttributeError, RuntimeError) as error:
            raise CommandRefusedError(
                f"this allocator has no snapshot: {error}", ReasonCode.NOT_SUPPORTED_BY_ALLOCATOR
            ) from None

    def heaps(self, segments: Iterable[Mapping[str, Any]]) -> Mapping[int, Heap]:
        """Add up the segments of a snapshot, which was taken right before."""
        # Dead pools are read after the snapshot: they stay dead. A pool that died during it counts as dead.
        return read_heaps(segments, large_pages=self._large_pages, dead_pools=self._captures.dead_pools())

    def _notice_page_size(self) -> None:
        # A segment keeps the page size that was set when it was made, and does not report it: so all sizes are kept.
        page = _large_page(self.settings)
        if page is not None:
            self._large_pages.add(page)

    def _walk(self) -> Mapping[int, Heap] | None:
        try:
            segments = torch_access.snapshot_segments(self._torch)
        except (AttributeError, RuntimeError):
            return None
        heaps = self.heaps(segments)
        self._captures.keep_only({tuple(segment.get("segment_pool_id", ())) for segment in segments})
        return heaps

    def _sample(self, index: int, state: DeviceState | None, nccl_bytes: int | None = None) -> DeviceSample:
        uuid = self.uuid(index)
        if state is None:
            return DeviceSample(uuid, nccl_bytes=nccl_bytes)
        private = state.get("private_pools_bytes")
        segments = state.get("segment", {})
        allocated_peak = known(state, "allocated_bytes", "peak")
        sample = DeviceSample(
            uuid=uuid,
            allocated_bytes=known(state, "allocated_bytes"),
            reserved_bytes=known(state, "reserved_bytes"),
            active_bytes=known(state, "active_bytes"),
            inactive_split_bytes=known(state, "inactive_split_bytes"),
            requested_bytes=known(state, "requested_bytes"),
            allocated_peak_bytes=self._observed.lifted(index, "allocated_bytes", allocated_peak),
            reserved_peak_bytes=self._observed.lifted(index, "reserved_bytes", known(state, "reserved_bytes", "peak")),
            private_pools_bytes=self._reclaimable.private_bytes(index, state) if private is None else private,
            reclaimable_bytes=self._reclaimable.bytes(index, state),
            alloc_retries=state.get("num_alloc_retries"),
            ooms=state.get("num_ooms"),
            segments_allocated=segments.get("allocated"),
            segments_freed=segments.get("freed"),
            cache_flushes=state.get("num_sync_all_streams"),
            peak_resets=None if allocated_peak is None else self._observed.peak_resets(index),
            nccl_bytes=nccl_bytes,
            memory_limit_bytes=self.memory_limit_bytes(index),
            phase_peak_bytes={name: peak.at_least_bytes for name, peak in self._observed.phases(index).items()},
            component_bytes=self._observed.components(index),
        )
        return self._with_engine(index, state, sample)

    def _with_engine(self, index: int, state: DeviceState, sample: DeviceSample) -> DeviceSample:
        """Return the sample without unmapped memory, and with the components of the engine in this process."""
        segments = self._reclaimable.pool_segments(index, state)
        unmapped = unmapped_in(segments)
        if can_unmap():
            sample = without_unmapped(sample, None if unmapped is None else Unmapped.of(unmapped))
        facts, tags = self._engine.read(), self._engine.segment_components()
        if facts is None and not tags:
            return sample
        if segments is None or unmapped is None:
            return replace(sample, component_bytes={})
        held = {} if facts is None else facts.held.get(index, {})
        sample = with_components(sample, held, tags, segments, unmapped, self._captures.pools())
        return with_cache_use(sample, None if facts is None else facts.cache)


def _large_page(settings: str) -> int | None:
    """Return the page size of expandable segments in the large pool, in bytes, if the settings have one (2.10+)."""
    found = re.search(r"\blarge_segment_size_mb:(\d+)", settings.replace(" ", ""))
    return int(found[1]) << 20 if found else None


def attached(function: str = "") -> Allocator | None:
    """Return the allocator that the user's calls share, or None without CUDA and in a forked child of such a process.

    The reporter has another one, for its own thread. Does not initialize CUDA. Any thread may call this. `function` is
    what the user has called, if that does nothing without CUDA: a line of the log says so.
    """
    if torch_access.initialized_torch() is None:
        if function:
            no_cuda(function)
        return None
    shared: Allocator | None = singletons.get("shared_allocator")
    if shared is None:
        made = Allocator.attach()
        shared = singletons.setdefault("shared_allocator", made)
        if made is not None and made is not shared:
            made.detach()  # another thread was faster: no hook may stay
    return shared


@functools.lru_cache(maxsize=None)
def no_cuda(function: str) -> None:
    """Log once that a function does nothing because CUDA is not initialized."""
    log.warning("%s: no CUDA in this process, nothing is done", function)
