"""A plan: predicted memory, batch size and accumulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import UNKNOWN, ShownAsText, human_bytes
from gpumem_toolkit.planning.devices import Gpu

_SOURCES = {
    "model": "a simulated training step of the model",
    "transformers": "a simulated step of transformers' Trainer",
    "lightning": "a simulated step of Lightning's Trainer",
    "profile": "training steps measured on this machine's GPU",
    "description": "the sizes of a transformer",
}
# The starts of the headings of columns with numbers.
_NUMBERS = ("total", "to spare", "largest", "at ", "peak")


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a plan."""

    effective_batch: int | None = None
    """Samples in one optimizer step over all devices; None means one batch of the largest size."""
    devices: int = 1
    margin: float = 0.85
    """The part of the device's free memory that the plan uses."""
    multiple_of: int = 1
    batch: int | None = None
    """Samples in one pass; None means the planner chooses."""

    def __post_init__(self) -> None:
        if not 0 < self.margin <= 1:
            raise ConfigurationError(f"invalid margin {self.margin}: it must be above 0 and at most 1")
        for name in ("devices", "multiple_of", "effective_batch", "batch"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigurationError(f"invalid {name.replace('_', ' ')} {value}: it must be at least 1")
        if self.batch is not None and self.batch % self.multiple_of:
            raise ConfigurationError(f"invalid batch {self.batch}: it must be a multiple of {self.multiple_of}")
        if self.batch is not None and self.effective_batch is not None:
            raise ConfigurationError("a target effective batch determines the batch: give one of them")


@dataclass(frozen=True, slots=True)
class Change:
    """The effect of one change of the job."""

    name: str
    reserved_peak_bytes: int | None
    """The reserved peak at the plan's batch size; None if the change is impossible."""
    largest_batch: int | None
    """The largest batch size on the first device."""
    note: str = ""
    """What the change costs, or why it is impossible."""
    fits_on: tuple[str, ...] = ()
    """The devices on which the plan's batch size fits with the change."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether the plan's batch size fits on a device."""

    gpu: Gpu
    fits: bool
    spare_bytes: int
    """The bytes that the plan leaves of what it may use. Negative: the bytes that are missing."""
    largest_batch: int


@dataclass(frozen=True, slots=True)
class Plan(ShownAsText):
    """The predicted memory of a job on a device. All sizes are bytes."""

    source: str
    """`model`, `transformers`, `lightning`, `profile` (measured on a device) or `description`."""
    gpu: Gpu
    """The first device, for which the planner chooses the batch size."""
    margin: float
    """The part of the device's free memory that the plan uses."""
    largest_batch: int
    """The largest batch size that fits; 0 if none fits."""
    batch: int
    """The batch size to train with: the requested one, the largest, or a smaller one that reaches the target."""
    accumulation: int
    """Backward passes before each optimizer step."""
    target_effective_batch: int | None
    devices: int
    allocated_peak_bytes: int
    """The prediction for `torch.cuda.max_memory_allocated` at `batch`."""
    reserved_peak_bytes: int
    """The prediction for `torch.cuda.max_memory_reserved`."""
    breakdown: Mapping[str, int]
    """Each kind of memory at the peak. `overhead` is the allocator's rounding and cache."""
    highest: Mapping[str, int] = field(default_factory=dict)
    """The peak of each kind of memory, reached at different times. Empty if only the total is known."""
    changes: tuple[Change, ...] = ()
    """Changes that save memory, ordered by their cost: the cheapest first."""
    notes: tuple[str, ...] = ()
    """What the job does on a device and the plan leaves out."""
    on: tuple[Fit, ...] = ()
    """The answer for each device."""

    @property
    def fits(self) -> bool:
        """Whether the batch size fits."""
        return self.batch <= self.largest_batch

    @property
    def effective_batch(self) -> int:
        """Samples in one optimizer step over all devices."""
        return self.batch * self.accumulation * self.devices

    def __str__(self) -> str:
        devices = [("device", "total", "fits", "to spare", "largest batch")]
        for fit in self.on:
            spare, total = human_bytes(fit.spare_bytes), human_bytes(fit.gpu.total_bytes)
            devices.append((fit.gpu.name, total, "yes" if fit.fits else "no", spare, str(fit.largest_batch)))
        memory = [("memory", "at the peak", "at most" if self.highest else "")]
        for kind, size in self.breakdown.items():
            memory.append((kind, human_bytes(size), human_bytes(self.highest.get(kind)) if self.highest else ""))
        changes = [("change", "peak", "largest batch", "fits on", "cost")] if self.changes else []
        for change in self.changes:
            largest = UNKNOWN if change.largest_batch is None else str(change.largest_batch)
            peak = human_bytes(change.reserved_peak_bytes)
            changes.append((change.name, peak, largest, self._fits_on(change.fits_on), change.note))
        tables = [["", *_aligned(rows)] for rows in (devices, memory, changes) if rows]
        return "\n".join(line for part in (self._answer(), *tables) for line in part)

    def _answer(self) -> list[str]:
        steps = f"accumulate {self.accumulation}, " if self.accumulation > 1 else ""
        devices = f" on {self.devices} devices" if self.devices > 1 else ""
        use = f"batch   {self.batch}, {steps}effective batch {self.effective_batch}{devices}"
        if self.target_effective_batch not in (None, self.effective_batch):
            use += f" (requested {self.target_effective_batch}, which does not divide evenly)"
        peaks = f"{human_bytes(self.reserved_peak_bytes)} reserved, {human_bytes(self.allocated_peak_bytes)} allocated"
        margin = f"margin  the plan uses {self.margin:.0%} of what context and driver leave"
        notes = [f"note    {note}" for note in self.notes]
        return [f"from    {_SOURCES[self.source]}", use, f"peak    {peaks}", margin, *notes]

    def _fits_on(self, names: Sequence[str]) -> str:
        """Name the devices of the plan on which a batch fits."""
        if len(self.on) == 1:
            return "yes" if names else "no"
        return "all" if len(names) == len(self.on) else ", ".join(names) or "none"

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as JSON-compatible values."""
        document = asdict(self)
        for gpu in (document["gpu"], *(fit["gpu"] for fit in document["on"])):
            gpu["free_bytes"] = Gpu(**gpu).free_bytes
        document["breakdown_bytes"] = document.pop("breakdown")
        document["highest_bytes"] = document.pop("highest")
        return {**document, "fits": self.fits, "effective_batch": self.effective_batch}


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the rows of a table as lines: numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.rjust(width) if head.startswith(_NUMBERS) else cell.ljust(width)
            for head, cell, width in zip(rows[0], row, widths, strict=True)
        ).rstrip()
        for row in rows
    ]


def accumulate(largest_batch: int, target: Target) -> tuple[int, int]:
    """Return the batch size and the accumulation that reach a target effective batch, or slightly exceed it."""
    if target.batch is not None:
        return target.batch, 1
    unit = target.multiple_of
    if target.effective_batch is None or largest_batch < unit:
        return max(unit, largest_batch), 1
    largest = largest_batch // unit
    share = -(-target.effective_batch // (target.devices * unit))
    # The target is reached exactly, if that takes less than twice the minimum number of passes.
    for even in range(min(largest, share), min(largest, share) // 2, -1):
        if share % even == 0:
            return even * unit, share // even
    accumulation = -(-share // largest)
    return -(-share // accumulation) * unit, accumulation
