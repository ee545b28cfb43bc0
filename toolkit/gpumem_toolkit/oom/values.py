"""The values of an out-of-memory error, from which the advice is derived."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_toolkit.oom.known_causes import Cause


@dataclass(frozen=True, slots=True)
class OomValues:
    """Values at the time of the error, in bytes unless the name says otherwise. None and empty are unknown."""

    phase: str = ""
    """`forward`, `backward`, `optimizer`, `data transfer`, `model transfer`, `a copy`, `loading`, a phase of the user's
    code, or empty."""
    user_phase: str = ""
    """The innermost phase of the user's code at the error; empty without one."""
    recomputed: bool = False
    """Whether a backward pass was recomputing a checkpointed part."""
    place: str = ""
    """The innermost line of the user's code."""
    device: int | None = None
    causes: tuple[Cause, ...] = ()
    """Known causes whose code the traceback passes, the likeliest first."""
    gradients: bool = False
    """Whether activations are kept for a backward pass."""
    evaluating: bool = False
    """Whether the model is in evaluation mode."""
    losses: int = 0
    """Forward passes whose losses wait for one backward pass."""

    requested: int | None = None
    free: int | None = None
    """Free memory of the device."""
    total: int | None = None
    """Memory of the device without what the driver reserves."""
    allowed: int | None = None
    """Limit by the memory fraction of the process, if one is set."""
    other_processes: tuple[tuple[int, int], ...] = ()
    """Process id and bytes."""
    non_torch: int | None = None
    """Bytes of this process outside PyTorch's allocator: context, libraries."""

    allocated: int | None = None
    reserved: int | None = None
    private_pools: int | None = None
    reclaimable: int | None = None
    """Bytes that emptying the cache would release. Zero for PyTorch's own errors: it empties the cache first."""
    fragmented: int | None = None
    """Reserved bytes that are in no tensor and that emptying the cache does not release."""
    expandable: bool = False
    """Whether expandable segments are in use."""
    expandable_conflict: str = ""
    """Why expandable segments are no option in this process; empty if they are one."""

    batch_size: int | None = None
    grown: int | None = None
    """Growth since the start of the guarded block: batch, activations and gradients so far."""
    batch_growth: int | None = None
    """Expected growth of the block at its peak with this batch, from earlier runs."""
    bytes_per_item: int | None = None
    """Share of `batch_growth` per item of the batch, from earlier runs."""

    leaked: int | None = None
    """Growth from run to run of the block."""
    leak_per_step: int | None = None
    leak_suspects: tuple[str, ...] = ()

    optimizer: str = ""
    """Class of the optimizer whose step failed."""
    parameters: int | None = None
    """Parameters of that optimizer, or of the model that was moved."""
    optimizer_state: int | None = None
    optimizer_state_missing: int | None = None
    """State that the optimizer still had to create in this step."""
    optimizer_fused: bool = False
    """Whether the step updates all tensors in one kernel, without temporary copies."""
    optimizer_foreach: bool = False
    """Whether the step makes temporary copies of all tensors at once instead of one after the other."""
    ranks: int = 1

    @property
    def other(self) -> int:
        """Bytes of all other processes."""
        return sum(size for _, size in self.other_processes)

    @property
    def available(self) -> int | None:
        """Bytes that the driver could give to the next allocation, within the memory fraction."""
        if self.allowed is None or self.reserved is None:
            return self.free
        left = max(0, self.allowed - self.reserved)
        return left if self.free is None else min(self.free, left)

    @property
    def needed(self) -> int | None:
        """Bytes that the block still needed: the request, or its expected growth if that is more."""
        ahead = [self.requested or 0, self.optimizer_state_missing or 0]
        if self.batch_growth is not None and self.grown is not None:
            ahead.append(self.batch_growth - self.grown)
        return max(ahead) or None

    @property
    def short(self) -> int | None:
        """The bytes that are missing: needed minus available, at least 1."""
        if self.needed is None or self.available is None:
            return None
        return max(1, self.needed - self.available)

    def covered_by(self, saved: int | None) -> bool | None:
        """Whether saving these bytes would have been enough; None if unknown."""
        return None if saved is None or self.short is None else saved >= self.short
