"""What a plan says: figures and the answers that follow from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem_exporter.training.planning.devices import Gpu

__all__ = ["Change", "Plan", "accumulate"]


@dataclass(frozen=True, slots=True)
class Change:
    """The same job with one thing changed.

    Attributes:
        name: what is changed.
        reserved_peak_bytes: at the plan's batch size; None where the job cannot be changed that way.
        largest_batch: that would then fit; None where unknown.
        note: what it costs, or why it cannot be.
    """

    name: str
    reserved_peak_bytes: int | None
    largest_batch: int | None
    note: str = ""


@dataclass(frozen=True, slots=True)
class Plan:
    """A job on a device, before it runs. All sizes are bytes.

    Attributes:
        source: where the figures come from: `model`, `profile` (measured on a device) or `description`.
        margin: which part of the device's free memory may be planned with.
        largest_batch: the largest one that fits; 0 when not even one sample does.
        batch: what to train with: the largest, or less where the target is reached with less.
        accumulation: backward passes before each optimizer step.
        target_effective_batch: what was asked for, over all devices; None when nothing was.
        devices: data-parallel processes.
        allocated_peak_bytes: what `torch.cuda.max_memory_allocated` will say at `batch`.
        reserved_peak_bytes: what `max_memory_reserved` will: what the job takes of the device beside its context.
        breakdown: parameters, buffers, gradients, optimizer, activations, temporaries at the moment of the peak, and
            overhead: what the allocator rounds up and holds in its cache.
        highest: the most of each of these at any moment; not all at the same one. Empty where only the peak is known.
        changes: what else could be done, with what it would give.
    """

    source: str
    gpu: Gpu
    margin: float
    largest_batch: int
    batch: int
    accumulation: int
    target_effective_batch: int | None
    devices: int
    allocated_peak_bytes: int
    reserved_peak_bytes: int
    breakdown: Mapping[str, int]
    highest: Mapping[str, int] = field(default_factory=dict)
    changes: tuple[Change, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether any batch size does."""
        return self.largest_batch > 0

    @property
    def effective_batch(self) -> int:
        """Samples in one optimizer step, over all devices."""
        return self.batch * self.accumulation * self.devices

    def error_ratio(self, reserved_peak_bytes: int) -> float:
        """How far the plan was from a measured `torch.cuda.max_memory_reserved`: 0.05 is 5 % too much planned."""
        return self.reserved_peak_bytes / reserved_peak_bytes - 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "gpu": {
                "name": self.gpu.name,
                "total_bytes": self.gpu.total_bytes,
                "overhead_bytes": self.gpu.overhead_bytes,
                "free_bytes": self.gpu.free_bytes,
            },
            "margin": self.margin,
            "fits": self.fits,
            "largest_batch": self.largest_batch,
            "batch": self.batch,
            "accumulation": self.accumulation,
            "devices": self.devices,
            "effective_batch": self.effective_batch,
            "target_effective_batch": self.target_effective_batch,
            "allocated_peak_bytes": self.allocated_peak_bytes,
            "reserved_peak_bytes": self.reserved_peak_bytes,
            "breakdown_bytes": dict(self.breakdown),
            "highest_bytes": dict(self.highest),
            "changes": [
                {
                    "name": change.name,
                    "reserved_peak_bytes": change.reserved_peak_bytes,
                    "largest_batch": change.largest_batch,
                    "note": change.note,
                }
                for change in self.changes
            ],
        }


def accumulate(largest_batch: int, target: int | None, devices: int) -> tuple[int, int]:
    """Batch size and accumulation that reach a target.

    The target exactly, where that takes less than twice the fewest passes; else in the fewest, and a little more.
    """
    if target is None or largest_batch < 1:
        return max(1, largest_batch), 1
    share = -(-target // devices)
    for even in range(min(largest_batch, share), min(largest_batch, share) // 2, -1):
        if share % even == 0:
            return even, share // even
    accumulation = -(-share // largest_batch)
    return -(-share // accumulation), accumulation
