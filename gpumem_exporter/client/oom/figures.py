"""What is known at the moment of an out-of-memory error."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["OomFigures"]


@dataclass(frozen=True, slots=True)
class OomFigures:
    """Everything that advice follows from. Bytes, unless the name says otherwise; None and empty are unknown."""

    phase: str = ""
    """`forward`, `backward`, `optimizer`, `data transfer`, `model transfer`, one that the program named, or empty."""
    recomputed: bool = False
    """In a backward pass, while a checkpointed part is computed again."""
    place: str = ""
    """The program's own innermost line."""
    device: int | None = None

    requested: int | None = None
    free: int | None = None
    """On the device, whoever it is free for."""
    total: int | None = None
    """The device's memory, less what the driver keeps for itself."""
    allowed: int | None = None
    """What the process' memory fraction leaves it, where one is set."""
    other_processes: tuple[tuple[int, int], ...] = ()
    """Process id and bytes."""
    non_torch: int | None = None
    """What this process uses beyond its allocator: context, libraries."""

    allocated: int | None = None
    reserved: int | None = None
    private_pools: int | None = None
    reclaimable: int | None = None
    """What emptying the cache would give. PyTorch has emptied it before it raises; for a library's error it has not."""
    fragmented: int | None = None
    """Reserved, in no tensor, and emptying the cache does not return it."""
    expandable: bool = False
    """Segments are expandable already."""

    batch_size: int | None = None
    grown: int | None = None
    """Allocated since the guarded block began: this step's batch, activations and gradients so far."""
    batch_growth: int | None = None
    """What the guarded block grows by at its peak with this batch, by the runs measured before."""
    bytes_per_item: int | None = None
    """The part of that which each item of the batch takes, by the runs measured before."""

    leaked: int | None = None
    """Grown from run to run of the block, surely."""
    leak_per_step: int | None = None
    leak_suspects: tuple[str, ...] = ()

    optimizer: str = ""
    """The class of the optimizer that was stepping."""
    parameters: int | None = None
    """Of that optimizer, or of the model that was moved."""
    optimizer_state: int | None = None
    optimizer_state_missing: int | None = None
    """State that the optimizer has still to make in this step."""
    ranks: int = 1

    @property
    def other(self) -> int:
        """All that other processes use."""
        return sum(size for _, size in self.other_processes)

    @property
    def available(self) -> int | None:
        """What the next allocation could get from the driver: free, within what the fraction allows."""
        if self.allowed is None or self.reserved is None:
            return self.free
        left = max(0, self.allowed - self.reserved)
        return left if self.free is None else min(self.free, left)

    @property
    def needed(self) -> int | None:
        """What the block still needed: the request, or all that it was going to grow by, where that is known."""
        ahead = [self.requested or 0, self.optimizer_state_missing or 0]
        if self.batch_growth is not None and self.grown is not None:
            ahead.append(self.batch_growth - self.grown)
        return max(ahead) or None

    @property
    def short(self) -> int | None:
        """How much too little there was."""
        if self.needed is None or self.available is None:
            return None
        return max(1, self.needed - self.available)
