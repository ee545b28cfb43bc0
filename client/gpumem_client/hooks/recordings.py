"""Notices when other code starts or ends a recording of the allocator's history, while the client records.

Torch does not show whose recording is on. The hook replaces the functions in C through which torch's Python functions
start and end every recording.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from gpumem_client import torch_access


class RecordingHook:
    """The replaced functions, until `remove`. One thread must make all calls."""

    def __init__(self, torch: Any) -> None:
        self.noticed = False
        """Whether another thread, or other code, has started or ended a recording."""
        self._own_thread = 0
        self._module, originals = torch_access.history_functions(torch)
        self._replaced = {name: (original, self._noticing(original)) for name, original in originals.items()}
        for name, (_, replacement) in self._replaced.items():
            setattr(self._module, name, replacement)

    @contextmanager
    def own_calls(self) -> Iterator[None]:
        """Notice no calls of this thread within the context."""
        self._own_thread = threading.get_ident()
        try:
            yield
        finally:
            self._own_thread = 0

    def remove(self) -> None:
        """Restore the functions. If other code has replaced one since, it stays and has no effect."""
        for name, (original, replacement) in self._replaced.items():
            if getattr(self._module, name, None) is replacement:
                setattr(self._module, name, original)

    def _noticing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def function(*arguments: Any, **named: Any) -> Any:
            if threading.get_ident() != self._own_thread:
                self.noticed = True
            return original(*arguments, **named)

        return function
