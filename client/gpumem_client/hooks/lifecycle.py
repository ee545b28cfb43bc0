"""Calls at the interpreter's exit and in forked children: the only place of the client that registers them."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable

__all__ = ["after_fork_in_child", "at_exit"]

_in_child: list[Callable[[], None]] = []
_registered = False


def at_exit(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` when the interpreter exits; returns a function that removes it again."""
    atexit.register(callback)
    return lambda: atexit.unregister(callback)


def after_fork_in_child(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` in each forked child, in the order of registration; returns a function that removes it again.

    Python has no way to unregister a function from `os.register_at_fork`. One function stays there for the whole
    client, and does nothing while no callback is registered here.
    """
    global _registered
    _in_child.append(callback)
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_run)

    def remove() -> None:
        if callback in _in_child:
            _in_child.remove(callback)

    return remove


def _run() -> None:
    for callback in _in_child:
        callback()
