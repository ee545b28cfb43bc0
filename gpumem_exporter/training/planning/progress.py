"""Shows on a terminal what the planner is doing."""

from __future__ import annotations

import sys
from collections.abc import Callable

__all__ = ["Progress"]

_CLEAR = "\r\033[K"


class Progress:
    """One line on standard error, if it is a terminal. The line is cleared at the end."""

    def __init__(self) -> None:
        self._stream = sys.stderr if sys.stderr.isatty() else None
        self._runs = 0

    def of(self, name: str) -> Callable[[int], None]:
        """Return a function that shows a run of the named job at a batch size."""

        def show(batch: int) -> None:
            self._runs += 1
            if self._stream is not None:
                text = f"{_CLEAR}planning: run {self._runs}: {name}, batch {batch} …"
                print(text, end="", file=self._stream, flush=True)

        return show

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._stream is not None:
            print(_CLEAR, end="", file=self._stream, flush=True)
