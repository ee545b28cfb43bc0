"""The allocator as the program's own calls use it; the reporter has another, for its own thread."""

from __future__ import annotations

from gpumem_exporter.client.allocator.statistics import initialised_torch
from gpumem_exporter.client.allocator.torch_access import Allocator
from gpumem_exporter.client.log import log

__all__ = ["attached", "detach", "no_cuda"]


class _Attached:
    """Attaches once, when first asked after CUDA was initialised."""

    def __init__(self) -> None:
        self._allocator: Allocator | None = None
        self._told = False

    def allocator(self) -> Allocator | None:
        if initialised_torch() is None:  # asked each time: in a forked child the parent's allocator must not be touched
            return None
        if self._allocator is None:
            self._allocator = Allocator.attach()
        return self._allocator

    def detach(self) -> None:
        allocator, self._allocator = self._allocator, None
        if allocator is not None:
            allocator.detach()

    def no_cuda(self, what: str) -> None:
        if not self._told:
            self._told = True
            log.warning("%s: no CUDA in this process, nothing is done", what)


# As with the reporter: a process has one allocator.
_process = _Attached()


def attached() -> Allocator | None:
    """The allocator, where this process has initialised CUDA; any thread may ask. Initialises nothing.

    Two threads may use what it gives only where `Allocator` says that any may.
    """
    return _process.allocator()


def detach() -> None:
    """Remove the hooks of that allocator from torch; the next call that needs it attaches again."""
    _process.detach()


def no_cuda(what: str) -> None:
    """Say, once in a process, that there is nothing to act upon."""
    _process.no_cuda(what)
