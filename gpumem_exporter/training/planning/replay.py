"""Plays a trace through a model of PyTorch's caching allocator: what it would have reserved.

The model is the demonstration's, which is held against the real allocator by its own tests.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_exporter.core.allocator_model import Block, CachingAllocator, SimulatedOutOfMemoryError
from gpumem_exporter.training.planning.trace import Trace

__all__ = ["Peaks", "replay"]


@dataclass(frozen=True, slots=True)
class Peaks:
    """What `torch.cuda.max_memory_allocated` and `…_reserved` would say at the end.

    Attributes:
        retries: how often the cache had to be flushed to go on; more than a few make a job slow.
        out_of_memory: the job ended with an OOM; the peaks are those until then.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int = 0
    out_of_memory: bool = False


class _Device:
    """The memory that the driver has left for this process' tensors."""

    def __init__(self, free_bytes: int | None) -> None:
        self.free_bytes = free_bytes

    def allocate(self, size_bytes: int) -> bool:
        if self.free_bytes is None:
            return True
        if size_bytes > self.free_bytes:
            return False
        self.free_bytes -= size_bytes
        return True

    def free(self, size_bytes: int) -> None:
        if self.free_bytes is not None:
            self.free_bytes += size_bytes


def replay(trace: Trace, free_bytes: int | None = None) -> Peaks:
    """Play a trace on a device with that many bytes free for the allocator; None: as many as it takes."""
    allocator = CachingAllocator(_Device(free_bytes))
    blocks: dict[int, Block] = {}
    out_of_memory = False
    for event in trace.events:
        if event < 0:
            block = blocks.pop(-event, None)
            if block is not None:
                allocator.free(block)
        elif trace.sizes[event]:
            try:
                blocks[event] = allocator.allocate(trace.sizes[event])
            except SimulatedOutOfMemoryError:
                out_of_memory = True
                break
    stats = allocator.statistics
    return Peaks(stats.allocated_peak_bytes, stats.reserved_peak_bytes, stats.alloc_retries, out_of_memory)
