"""Calls a listener at each out-of-memory error, in the allocating thread, before PyTorch raises the error."""

from __future__ import annotations

from collections.abc import Callable

from gpumem_client.hooks.guest_safety import guest_safety

__all__ = ["OutOfMemoryObserver"]


class OutOfMemoryObserver:
    """The observer that PyTorch calls. PyTorch cannot remove an observer: it stays for the life of the process.

    While there is no listener, a call does nothing. An exception of the observer would replace the user's
    OutOfMemoryError.
    """

    def __init__(self) -> None:
        self.attached = False
        self.listener: Callable[[int, int, int, int], None] | None = None
        """Receives device index, requested bytes, limit and free bytes."""

    def install(self, attach: Callable[[OutOfMemoryObserver], bool]) -> None:
        """Attach this observer to PyTorch, once per process. `attach` returns False if the allocator has none."""
        self.attached = self.attached or attach(self)

    def remove(self, listener: Callable[[int, int, int, int], None] | None) -> None:
        """Stop calling this listener. The listener of a later reporter stays."""
        if self.listener is listener:
            self.listener = None

    @guest_safety()
    def __call__(self, device: int, requested_bytes: int, limit_bytes: int, device_free_bytes: int) -> None:
        """Pass the numbers of an error to the listener, if there is one."""
        listener = self.listener
        if listener is not None:
            listener(device, requested_bytes, limit_bytes, device_free_bytes)
