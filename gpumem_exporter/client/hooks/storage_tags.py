"""Makes torch write the storages that a thread saves as if they lay in the host's memory.

The hook is a tagger in the registry of `torch.serialization`. It is there while a thread is in `saved_from_host`, and
answers for the storages of that thread only.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from gpumem_exporter.client.allocator.torch_access import serialization_registry
from gpumem_exporter.client.hooks.call_stacks import any_thread_runs

__all__ = ["saved_from_host"]

_PRIORITY = -9844
"""Before torch's own taggers (10 and up). Torch sorts them by it and cannot compare two of the same."""


class _Tagger(threading.local):
    """What the current thread does with each storage that it saves; None while it saves nothing for the client."""

    note: Callable[[Any], None] | None = None

    def tag(self, storage: Any) -> str | None:
        """What `torch.serialization.register_package` asks for."""
        if self.note is None or storage.device.type == "meta":
            return None
        self.note(storage)
        return "cpu"


class _Registration:
    """The tagger's place in torch's registry, shared by all threads that save."""

    def __init__(self) -> None:
        self._tagger = _Tagger()
        self._lock = threading.RLock()  # a signal's handler may save while this is held
        self._users = 0
        self._registered: tuple[Any, ...] | None = None

    @contextlib.contextmanager
    def saving(self, note: Callable[[Any], None]) -> Iterator[None]:
        """Answer for the storages of this thread; a signal's handler may save something else meanwhile."""
        self.install()
        outer, self._tagger.note = self._tagger.note, note
        try:
            yield
        finally:
            self._tagger.note = outer
            self.remove()

    def install(self) -> None:
        """Register the tagger, unless another thread has."""
        with self._lock:
            self._users += 1
            if self._registered is None:
                self._registered = (_PRIORITY, self._tagger.tag, _restore_nothing)
                sys.modules["torch.serialization"].register_package(*self._registered)

    def remove(self) -> None:
        """Remove the tagger with its last user.

        Torch walks over its registry for each storage that any thread saves or loads. A removal meanwhile would make
        that walk skip an entry: then the tagger stays, answers nothing, and is removed after a later save.
        """
        with self._lock:
            self._users -= 1
            registry = serialization_registry()
            if self._users or registry is None or self._registered not in registry:
                return
            file = getattr(sys.modules["torch.serialization"], "__file__", "") or ""
            if not any_thread_runs("location_tag", file) and not any_thread_runs("default_restore_location", file):
                registry.remove(self._registered)
                self._registered = None


def _restore_nothing(_storage: Any, _location: str) -> None:
    """Torch asks each entry of the registry to restore a storage; this one never does."""


saved_from_host = _Registration().saving
"""`with saved_from_host(note):` has this thread's storages saved as the host's, and calls `note` with each."""
