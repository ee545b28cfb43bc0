"""Tells for which of the user's threads a thread works.

A backward pass runs in threads of autograd, which do not have the caller's thread-locals and context variables. They do
have PyTorch's own thread-local state: the engine copies it from the caller into each thread that does a part of its
work. So a thread that enters a phase puts its number there.
"""

from __future__ import annotations

import threading

from gpumem_exporter.client.allocator import torch_access
from gpumem_exporter.client.hooks.guest_safety import guest_safety

__all__ = ["calling_thread", "mark_thread"]


@guest_safety()
def mark_thread() -> None:
    """Put this thread's number there, unless the thread works for another one; takes 0.1 µs.

    Does nothing before the user's code has imported torch, and before torch 2.0.
    """
    torch_access.set_calling_thread_mark(threading.get_ident())


@guest_safety()
def calling_thread() -> int | None:
    """Return the number of the thread for which this one works, which may be itself; None if no number is there."""
    return torch_access.calling_thread_mark()
