"""What goes wrong inside a reporter: swallowed, said once for each kind, never raised into the program."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator

from gpumem_exporter.client.log import log

__all__ = ["Troubles"]


class Troubles:
    """Swallows errors and logs the first of each kind. Any thread may use it.

    Args:
        on_trouble: called with each error before it is swallowed; tests pass one that records or raises.
    """

    def __init__(self, on_trouble: Callable[[str, BaseException], None] | None = None) -> None:
        self._on_trouble = on_trouble
        self._said: set[str] = set()

    def note(self, kind: str, error: BaseException, level: int = logging.WARNING) -> None:
        """Log one line for the first trouble of this kind; later ones are silent until `clear`."""
        if self._on_trouble is not None:
            self._on_trouble(kind, error)
        if kind not in self._said:
            self._said.add(kind)
            log.log(level, "%s: %s", kind, error)

    def clear(self, kind: str) -> None:
        """The trouble is over: the next one of this kind is news again."""
        self._said.discard(kind)

    @contextlib.contextmanager
    def swallowed(self, kind: str) -> Iterator[None]:
        """Keep whatever the block raises from the program."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - a guest breaks nothing
            self.note(kind, error)
