"""The objects that exist once in a process, because the process has one allocator and one training loop.

Each object is made on first use, so that importing the client stays cheap. A hook into torch or the interpreter is
process-wide by nature: its state is in its module in `client.hooks`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpumem_exporter.client.allocator.attached import AttachedAllocator
    from gpumem_exporter.client.hooks.steps import Steps
    from gpumem_exporter.client.measure.observed import Observed
    from gpumem_exporter.client.reporter.reporter import Reporter

__all__ = [
    "attached_allocator",
    "detach_allocator",
    "observed",
    "reporter",
    "reporter_if_made",
    "steps",
    "steps_if_made",
]

_Made = TypeVar("_Made")

_made: dict[str, Any] = {}


def steps() -> Steps:
    """Return the steps of this process."""
    from gpumem_exporter.client.hooks.steps import Steps

    return _once("steps", Steps)


def steps_if_made() -> Steps | None:
    """Return the steps of this process, or None if nothing has listened to them yet."""
    return _made.get("steps")


def observed() -> Observed:
    """Return the phases, peaks and components of this process."""
    from gpumem_exporter.client.measure.observed import Observed

    return _once("observed", Observed)


def attached_allocator() -> AttachedAllocator:
    """Return the allocator that the user's calls share."""
    from gpumem_exporter.client.allocator.attached import AttachedAllocator

    return _once("attached_allocator", AttachedAllocator)


def detach_allocator() -> None:
    """Remove the hooks of the allocator that the user's calls share, if there was such a call."""
    allocator = _made.get("attached_allocator")
    if allocator is not None:
        allocator.detach()


def reporter() -> Reporter:
    """Return the reporter of this process."""
    from gpumem_exporter.client.reporter.reporter import Reporter

    return _once("reporter", lambda: Reporter(steps()))


def reporter_if_made() -> Reporter | None:
    """Return the reporter of this process, or None if none was started yet."""
    return _made.get("reporter")


def _once(name: str, make: Callable[[], _Made]) -> _Made:
    """Return the object of this name; if two threads make it at the same time, both get the same one.

    A lock could be held by another thread when the process forks. Making an object has no effect outside of it.
    """
    found: _Made = _made[name] if name in _made else _made.setdefault(name, make())
    return found
