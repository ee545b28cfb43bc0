"""A program in an emulated terminal: its screen, its keyboard and its modes."""

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
"""The input, output, control and local modes in the result of `termios.tcgetattr`."""


class TerminalProgram:
    """A program whose input, output and controlling terminal is emulated."""

    def __init__(
        self, arguments: Sequence[str], environment: Mapping[str, str], *, columns: int = 80, lines: int = 24
    ) -> None:
        self._terminal, program_side = os.openpty()
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.output = b""
        """The complete output."""
        self._set_size(columns, lines)
        self.modes_before = self.modes()
        try:
            self.process = subprocess.Popen(
                arguments,
                stdin=program_side,
                stdout=program_side,
                stderr=program_side,
                env=dict(environment),
                start_new_session=True,
                preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            )
        finally:
            os.close(program_side)

    @property
    def lines(self) -> list[str]:
        """The lines of the screen, without trailing blanks."""
        return [line.rstrip() for line in self.screen.display]

    @property
    def text(self) -> str:
        """The screen as one text."""
        return "\n".join(self.lines)

    def modes(self) -> list[Any]:
        """Return the modes of the terminal."""
        return termios.tcgetattr(self._terminal)[MODES]

    def type(self, keys: str) -> None:
        """Type on the keyboard."""
        os.write(self._terminal, keys.encode())

    def resize(self, columns: int, lines: int) -> None:
        """Resize the window."""
        self.pump()
        self.screen.resize(lines, columns)
        self._set_size(columns, lines)

    def pump(self, wait_seconds: float = 0.0) -> bool:
        """Read the output so far; return False after the end of the output."""
        while select.select([self._terminal], [], [], wait_seconds)[0]:
            try:
                written = os.read(self._terminal, 1 << 16)
            except OSError:  # EIO: the other side is closed
                return False
            if not written:
                return False
            self.output += written
            self._stream.feed(written)
            # A screen is drawn at once: output that follows immediately is part of it.
            wait_seconds = 0.01
        return True

    def until(self, condition: Callable[[], T], what: str) -> T:
        """Read output until the condition returns something true, and return that; fails with the screen."""
        end = time.monotonic() + patient(60)
        while True:
            open_still = self.pump(0.02)
            answer = condition()
            if answer:
                return answer
            ended = "" if open_still else f"; it has ended with {self.process.poll()}"
            if not open_still or time.monotonic() > end:
                raise AssertionError(f"waited for {what}{ended}; the screen is\n{self.text}\n{answer!r}")

    def until_shows(self, *texts: str) -> None:
        """Read output until all texts are on the screen."""
        self.until(lambda: all(text in self.text for text in texts), f"{texts} on the screen")

    def wait(self) -> int:
        """Read output until the program exits, and return its exit status."""
        end = time.monotonic() + patient(60)
        while self.process.poll() is None:
            self.pump(0.02)
            assert time.monotonic() < end, f"it does not end; the screen is\n{self.text}"
        self.pump()
        return self.process.returncode

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def hang_up(self) -> int:
        """Close the terminal, and return the exit status of the program."""
        os.close(self._terminal)
        self._terminal = -1
        return self.process.wait(patient(60))

    def close(self) -> None:
        """Kill the program and its children in the terminal."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(patient(60))
        if self._terminal >= 0:
            os.close(self._terminal)

    def _set_size(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
