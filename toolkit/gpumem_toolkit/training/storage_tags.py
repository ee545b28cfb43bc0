"""Makes torch save storages of a device as if they were in host memory.

The hook is a tagger in the registry of `torch.serialization`. It is there while a thread is in `saved_from_host`, and
tags the storages of that thread only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gpumem_client.torch_access import remove_from_serialization_registry

__all__ = ["saved_from_host"]

_PRIORITY = -9844
"""Lower than the priorities of torch's taggers (10 and up). Must be unique: torch cannot sort equal priorities."""


class _Tagger(threading.local):
    """The callback of the current thread for each storage that it saves; None outside of `saved_from_host`."""

    note: Callable[[Any], None] | None = None

    def tag(self, storage: Any) -> str | None:
        """Return the location of a storage, for `torch.serialization.register_package`."""
        if self.note is None or storage.device.type == "meta":
            return None
        self.note(storage)
        return "cpu"


class _Registration:
    """The tagger's entry in torch's registry, shared by all threads that save."""

    def __init__(self) -> None:
        self._tagger = _Tagger()
        self._lock = threading.RLock()  # reentrant: a signal handler may save while its thread holds the lock
        self._users = 0
        self._registered: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def saving(self, note: Callable[[Any], None]) -> Iterator[None]:
        """Tag the storages that this thread saves in the block. May be nested: a signal handler may save too."""
        self.install()
        outer, self._tagger.note = self._tagger.note, note
        try:
            yield
        finally:
            self._tagger.note = outer
            self.remove()

    def install(self) -> None:
        """Register the tagger, unless another thread has registered it."""
        with self._lock:
            self._users += 1
            if self._registered is None:
                self._registered = (_PRIORITY, self._tagger.tag, _restore_nothing)
                sys.modules["torch.serialization"].register_package(*self._registered)

    def remove(self) -> None:
        """Replace the registry by a list without the tagger, after the last save.

        A thread that is saving or loading a storage continues with the old list.
        """
        with self._lock:
            self._users -= 1
            if not self._users:
                remove_from_serialization_registry(self._registered)
                self._registered = None


def _restore_nothing(_storage: Any, _location: str) -> None:
    """Return None: this entry of the registry restores no storage."""


saved_from_host = _Registration().saving
"""`with saved_from_host(note):` saves this thread's storages as host memory, and calls `note` with each of them."""
