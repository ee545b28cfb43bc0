"""The objects that exist once in a process, because the process has one allocator and one training loop.

Each object is made on first use, so that importing the client stays cheap: `process_steps`, `process_observed`,
`process_reporter` and `shared_allocator`, each in the module of its class. A hook into torch or the interpreter is
also process-wide: its state is in its module in `client.hooks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["once", "once_made"]

_Made = TypeVar("_Made")

_objects: dict[str, Any] = {}


def once(name: str, make: Callable[[], _Made]) -> _Made:
    """Return the object of this name, and make it if there is none.

    If two threads make it at the same time, both get the same object. There is no lock, because another thread could
    hold it when the process forks. Making an object has no effect outside of it.
    """
    found: _Made = _objects[name] if name in _objects else _objects.setdefault(name, make())
    return found


def once_made(name: str) -> Any:
    """Return the object of this name; None if it was not made yet."""
    return _objects.get(name)
