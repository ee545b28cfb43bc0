"""Converts signals to flags and a byte in a pipe, because a signal handler must not draw."""

from __future__ import annotations

import contextlib
import os
import signal
from types import FrameType, TracebackType

__all__ = ["Signals"]

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCHED = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


class Signals:
    """Records signals for the loop. The main thread enters and exits it; any thread may call `notify`."""

    def __init__(self) -> None:
        self.ended: int | None = None
        """The signal that ends the program; None before one arrives."""
        self.suspended = False
        """Ctrl-Z was typed."""
        self.continued = False
        """The process was stopped and continues."""
        self.resized = False
        """The terminal has another size."""
        self._before: dict[int, object] = {}
        self._wakeup_before = -1
        self._read_end, self._write_end = -1, -1

    def __enter__(self) -> Signals:
        self._read_end, self._write_end = os.pipe()
        os.set_blocking(self._read_end, False)
        os.set_blocking(self._write_end, False)
        self._wakeup_before = signal.set_wakeup_fd(self._write_end, warn_on_full_buffer=False)
        for number in _WATCHED:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]
        signal.set_wakeup_fd(self._wakeup_before)
        write_end, self._write_end = self._write_end, -1
        os.close(write_end)
        os.close(self._read_end)

    @property
    def pipe(self) -> int:
        """A file descriptor that is readable after a signal or `notify`."""
        return self._read_end

    def notify(self) -> None:
        """Make the pipe readable."""
        # A full pipe is already readable, and no reader is left after the end.
        with contextlib.suppress(OSError):
            if self._write_end >= 0:
                os.write(self._write_end, b"\0")

    def drain(self) -> None:
        """Empty the pipe."""
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read_end, 4096):
                pass

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if number in _ENDING:
            self.ended = number
        elif number == signal.SIGTSTP:
            self.suspended = True
        elif number == signal.SIGCONT:
            self.continued = True
        else:
            self.resized = True
