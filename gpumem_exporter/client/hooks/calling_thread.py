"""For which of the program's threads a thread works.

A backward runs in threads of autograd's, which know nothing of Python's thread-locals and context variables. What they
have is PyTorch's own thread-local state: the engine copies the caller's into whichever thread does a part of its work,
for as long as that lasts, also where one backward begins another. So a thread that enters a phase leaves its number
there, and whoever works for it finds that.
"""

from __future__ import annotations

import sys
import threading

from gpumem_exporter.client.hooks.guest_safety import Swallowing

__all__ = ["calling_thread", "mark_thread"]

_KEY = "gpumem_thread"


def mark_thread() -> None:
    """Leave this thread's number for those that will work for it; 0.1 µs, 0.3 µs the first time. Raises nothing.

    One that works for another keeps the other's. Does nothing before the program has imported torch, nor before
    torch 2.0.
    """
    with Swallowing():
        c = sys.modules["torch"]._C
        if not c._is_key_in_tls(_KEY):
            c._stash_obj_in_tls(_KEY, threading.get_ident())


def calling_thread() -> int | None:
    """The number of the thread for which this one works, its own where that is itself; None where nobody left one.

    Raises nothing.
    """
    with Swallowing():
        c = sys.modules["torch"]._C
        if c._is_key_in_tls(_KEY):
            return int(c._get_obj_in_tls(_KEY))
    return None
