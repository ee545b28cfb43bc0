"""The life of this process: its objects that exist once, code that it loads later, its exit, its forked children.

Only this module registers calls at the exit and around forks.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

_Made = TypeVar("_Made")

singletons: dict[str, Any] = {}
"""The objects that exist once, by name: see `process_singleton`."""
_in_child: list[Callable[[], None]] = []
_registered = False
# The longest that a fork waits for code that is being loaded.
_LOAD_SECONDS = 2.0


def process_singleton(name: str, make: Callable[[], _Made]) -> _Made:
    """Return the object of this name, and make it if there is none. Making one has no effect outside of it."""
    # On first use, not on import: importing the client has to stay cheap.
    # No lock: another thread could hold it when the process forks. Of two threads, both get the object of one.
    found: _Made | None = singletons.get(name)
    return singletons.setdefault(name, make()) if found is None else found


def loading() -> AbstractContextManager[object]:
    """Return the context for imports of the client's own modules after its start, in any thread.

    A fork waits for the end of the block: the child could otherwise not import what is half loaded, because the thread
    that has its lock does not exist there.

    Raises:
        ImportError: the files of the client have changed since its start, and may not fit to what is loaded.
    """
    import threading  # the import of the client stays cheap

    _register()
    if _status_of_files() != _STATUS:
        raise ImportError("gpumem-client was replaced or removed while this process runs; start the process again")
    return process_singleton("load_lock", threading.RLock)


def at_exit(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` when the interpreter exits; returns a function that removes it again."""
    atexit.register(callback)
    return lambda: atexit.unregister(callback)


def after_fork_in_child(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` in each forked child, in the order of registration; returns a function that removes it again."""
    _in_child.append(callback)
    _register()

    def remove() -> None:
        if callback in _in_child:
            _in_child.remove(callback)

    return remove


def _register() -> None:
    global _registered
    if not _registered:
        # Python cannot unregister these: they stay, and do nothing without callbacks.
        _registered = True
        os.register_at_fork(before=_wait_for_loading, after_in_parent=_go_on, after_in_child=_run)


def _wait_for_loading() -> None:
    lock = singletons.get("load_lock")
    if lock is not None:
        lock.acquire(timeout=_LOAD_SECONDS)


def _go_on() -> None:
    lock = singletons.get("load_lock")
    try:
        if lock is not None:
            lock.release()
    except RuntimeError:
        pass  # the load took longer than this thread has waited, or started after that


def _run() -> None:
    singletons.pop("load_lock", None)
    for callback in tuple(_in_child):  # a callback may remove itself
        callback()


def _status_of_files() -> tuple[int, int] | None:
    """Return what changes when an installer writes this file again; None if it was removed, or is in an archive."""
    try:
        status = os.stat(__file__)  # noqa: PTH116 - pathlib takes long to import
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns  # some file systems change the inode of a file that stays


_STATUS = _status_of_files()
