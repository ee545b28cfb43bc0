"""Finds the user's thread for which an autograd thread works.

A backward pass runs in threads of autograd, which do not have the caller's thread-locals and context variables. But
they have PyTorch's own thread-local state, which the engine copies from the caller into each of its threads. So a
thread that enters a phase puts its number into that state.
"""

from __future__ import annotations

import threading

from gpumem_client.allocator import torch_access
from gpumem_client.hooks.guest_safety import guest_safety

__all__ = ["calling_thread", "mark_thread"]


@guest_safety()
def mark_thread() -> None:
    """Put this thread's number into torch's state, unless it works for another thread. Takes 0.1 µs.

    Does nothing before the user's code has imported torch, and before torch 2.0.
    """
    torch_access.set_calling_thread_mark(threading.get_ident())


@guest_safety()
def calling_thread() -> int | None:
    """Return the number of the thread for which this one works, perhaps itself; None if no number was set."""
    return torch_access.calling_thread_mark()
