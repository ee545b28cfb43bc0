"""Shows what the planner is doing, and ends it after a time limit."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable

_CLEAR = "\r\033[K"
_FIRST_LINE_SECONDS = 30.0


class Progress:
    """The current step of a plan. A thread shows it on standard error while the context is active.

    On a terminal one line is rewritten each second and cleared at the end. Elsewhere there is a line after 30 s, and
    whenever the time has doubled, so that a log shows a plan that takes long.

    Args:
        limit_seconds: the time limit of the context; None means unlimited.
        expire: called in the thread with the current step when the time limit has passed. It ends the process.
    """

    def __init__(self, limit_seconds: float | None = None, expire: Callable[[str], None] = lambda _: None) -> None:
        self.current = "importing PyTorch"
        self._limit_seconds = limit_seconds
        self._expire = expire
        self._stream = sys.stderr
        self._terminal = sys.stderr.isatty()
        self._runs = 0
        self._started = time.monotonic()
        self._next_line_seconds = _FIRST_LINE_SECONDS
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="gpumem-plan-progress", daemon=True)

    def step(self, text: str) -> None:
        """Set the current step."""
        self.current = text
        if self._terminal and self._thread.is_alive():
            self._show()

    def of(self, name: str) -> Callable[[int], None]:
        """Return a function that sets the step to a run of the named job at a batch size."""

        def run(batch: int) -> None:
            self._runs += 1
            self.step(f"run {self._runs}: {name}, batch {batch}")

        return run

    def __enter__(self) -> Progress:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        if self._terminal:
            print(_CLEAR, end="", file=self._stream, flush=True)

    def _watch(self) -> None:
        limit = float("inf") if self._limit_seconds is None else self._limit_seconds
        while not self._ended.wait(max(0.0, min(1.0, limit - self._elapsed()))):
            if self._elapsed() >= limit:
                self._expire(self.current)
                return
            if self._terminal or self._elapsed() >= self._next_line_seconds:
                self._next_line_seconds *= 2
                self._show()

    def _elapsed(self) -> float:
        return time.monotonic() - self._started

    def _show(self) -> None:
        text = f"planning for {self._elapsed():.0f} s: {self.current}"
        print(f"{_CLEAR}{text} …" if self._terminal else f"{text}\n", end="", file=self._stream, flush=True)
