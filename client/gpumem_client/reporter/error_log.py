"""Errors inside the reporter: swallowed, and logged once per kind."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

from gpumem_client.hooks.guest_safety import guest_safety
from gpumem_client.log import log

__all__ = ["ErrorLog"]


class ErrorLog:
    """Logs the first error of each kind. Any thread may use it.

    Args:
        on_error: called with each error; tests pass a function that records it.
    """

    def __init__(self, on_error: Callable[[str, BaseException], None] | None = None) -> None:
        self._on_error = on_error
        self._logged: set[str] = set()

    def note(self, kind: str, error: BaseException, level: int = logging.WARNING) -> None:
        """Log one line for the first error of this kind; later ones are silent until `clear`."""
        if self._on_error is not None:
            self._on_error(kind, error)
        if kind not in self._logged:
            self._logged.add(kind)
            log.log(level, "%s: %s", kind, error)

    def clear(self, kind: str) -> None:
        """Log the next error of this kind again, because the cause has ended."""
        self._logged.discard(kind)

    def swallowed(self, kind: str) -> guest_safety:
        """Return the boundary that notes and swallows the errors of a block."""
        return guest_safety(functools.partial(self.note, kind))
