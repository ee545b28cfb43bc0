"""A program in a terminal of its own, as somebody sits before it: what the screen shows, what is typed, its modes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pyte

from tests.support.waiting import patient

T = TypeVar("T")

MODES = slice(0, 4)
"""Of `termios.tcgetattr`: what input, output, line and local modes are set."""


class TerminalProgram:
    """A program whose input, output and controlling terminal is an emulated one.

    Args:
        arguments: its command line.
        environment: its environment, whole.
        columns: the terminal's width.
        lines: its height.
    """

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, columns: int = 80, lines: int = 24
    ) -> None:
        self._ours, theirs = os.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        """All that it has written."""
        self._set_size(columns, lines)
        self.modes_before = self.modes()
        try:
            self.process = subprocess.Popen(
                arguments,
                stdin=theirs,
                stdout=theirs,
                stderr=theirs,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        finally:
            os.close(theirs)

    @property
    def lines(self) -> list[str]:
        """The screen's lines, as they stand, without blanks at their ends."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The screen as one text."""
        return "\n".join(self.lines)

    def modes(self) -> list[Any]:
        """The terminal's modes."""
        return termios.tcgetattr(self._ours)[MODES]

    def type(self, keys: str) -> None:
        """Type on its keyboard."""
        os.write(self._ours, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Give the window another size."""
        self.pump()
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def pump(self, wait_seconds: float = 0.0) -> bool:
        """Take in what has been written; false when there is nothing more to come."""
        while select.select([self._ours], [], [], wait_seconds)[0]:
            try:
                written = os.read(self._ours, 1 << 16)
            except OSError:  # EIO: everybody has closed the other side
                return False
            if not written:
                return False
            self.output += written
            self._stream.feed(written)
            # A screen is drawn in one go: what follows at once belongs to it.
            wait_seconds = 0.01
        return True

    def until(self, condition: Callable[[], T], what: str, timeout_seconds: float = 60.0) -> T:
        """Take in output until the answer is true, and return it; fails with the screen."""
        end = time.monotonic() + patient(timeout_seconds)
        while True:
            open_still = self.pump(0.02)
            answer = condition()
            if answer:
                return answer
            ended = "" if open_still else f"; it has ended with {self.process.poll()}"
            if not open_still or time.monotonic() > end:
                raise AssertionError(f"waited for {what}{ended}; the screen is\n{self.text}\n{answer!r}")

    def until_shows(self, *texts: str) -> None:
        """Take in output until all of these stand on the screen."""
        self.until(lambda: all(text in self.text for text in texts), f"{texts} on the screen")

    def wait(self) -> int:
        """Take in output until it has ended, and return how."""
        end = time.monotonic() + patient(60)
        while self.process.poll() is None:
            self.pump(0.02)
            assert time.monotonic() < end, f"it does not end; the screen is\n{self.text}"
        self.pump()
        return self.process.returncode

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def hang_up(self) -> int:
        """The connection to the terminal breaks; returns how the program ended of it."""
        os.close(self._ours)
        self._ours = -1
        return self.process.wait(patient(60))

    def close(self) -> None:
        """Kill it and whatever it started in its terminal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(patient(60))
        if self._ours >= 0:
            os.close(self._ours)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
