"""The allocator that the user's own calls share; the reporter has another one, for its own thread."""

from __future__ import annotations

from gpumem_client.allocator.allocator import Allocator
from gpumem_client.allocator.torch_access import initialized_torch
from gpumem_client.log import log
from gpumem_client.process_state import once

__all__ = ["AttachedAllocator", "attached", "no_cuda", "shared_allocator"]


class AttachedAllocator:
    """Attaches to the allocator on the first call after CUDA was initialized. Any thread may call any method."""

    def __init__(self) -> None:
        self._allocator: Allocator | None = None
        self._warned = False

    def allocator(self) -> Allocator | None:
        """Return the allocator, or None without CUDA and in a forked child, which must not use the parent's."""
        if initialized_torch() is None:
            return None
        if self._allocator is None:
            self._allocator = Allocator.attach()
        return self._allocator

    def detach(self) -> None:
        """Remove the allocator's hooks from torch; the next call attaches again."""
        allocator, self._allocator = self._allocator, None
        if allocator is not None:
            allocator.detach()

    def warn_without_cuda(self, function: str) -> None:
        """Log the first call that does nothing because CUDA is not initialized."""
        if not self._warned:
            self._warned = True
            log.warning("%s: no CUDA in this process, nothing is done", function)


def shared_allocator() -> AttachedAllocator:
    """Return the allocator of this process that the user's calls share."""
    return once("shared_allocator", AttachedAllocator)


def attached() -> Allocator | None:
    """Return this process' allocator, or None if CUDA is not initialized.

    Does not initialize CUDA. See `Allocator` for the methods that several threads may call at once.
    """
    return shared_allocator().allocator()


def no_cuda(function: str) -> None:
    """Log once per process that a function does nothing because CUDA is not initialized."""
    shared_allocator().warn_without_cuda(function)
