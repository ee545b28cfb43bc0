"""The life of this process: its objects that exist once, its exit, and its forked children.

Only this module registers calls at the exit and in forked children.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_Made = TypeVar("_Made")

_objects: dict[str, Any] = {}
_in_child: list[Callable[[], None]] = []
_registered = False


def process_singleton(name: str, make: Callable[[], _Made]) -> _Made:
    """Return the object of this name, and make it if there is none. Making one has no effect outside of it."""
    # On first use, not on import: importing the client has to stay cheap.
    # No lock: another thread could hold it when the process forks. Of two threads, both get the object of one.
    found: _Made = _objects[name] if name in _objects else _objects.setdefault(name, make())
    return found


def made_singleton(name: str) -> Any:
    """Return the object of this name; None if it was not made yet."""
    return _objects.get(name)


def at_exit(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` when the interpreter exits; returns a function that removes it again."""
    atexit.register(callback)
    return lambda: atexit.unregister(callback)


def after_fork_in_child(callback: Callable[[], None], *, first: bool = False) -> Callable[[], None]:
    """Call `callback` in each forked child, in the order of registration; returns a function that removes it again.

    `first` is for locks that other callbacks take: another thread may have held them at the fork.
    """
    global _registered
    _in_child.insert(0 if first else len(_in_child), callback)
    if not _registered:
        # Python cannot unregister this: one function stays for the whole client, and does nothing without callbacks.
        _registered = True
        os.register_at_fork(after_in_child=_run)

    def remove() -> None:
        if callback in _in_child:
            _in_child.remove(callback)

    return remove


def _run() -> None:
    for callback in _in_child:
        callback()
