"""The terminal of live commands: the alternate screen, keys without Enter, restoration, and signals."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import tty
from types import FrameType
from typing import IO, TYPE_CHECKING, Any

from gpumem_exporter.cli.program import INTERRUPTED
from gpumem_exporter.cli.render.terminal import open_console, plain

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live

__all__ = ["Screen", "Signals", "exit_code_of"]

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""Wrapping is off, because a terminal wraps lines while it is resized."""
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_WATCHED = (*_ENDING, signal.SIGTSTP, signal.SIGCONT, signal.SIGWINCH)


class Screen:
    """A terminal in full-screen mode, and the file descriptor of its keyboard. Not thread-safe."""

    def __init__(self, output: IO[str], keyboard: int) -> None:
        self._output = output
        self._keyboard = keyboard
        self._console = open_console(output, force_terminal=True, force_interactive=True)
        self._live: Live | None = None
        self._modes: list[Any] | None = None
        """The terminal's modes before `enter`; None if it is not in full-screen mode."""
        self._drawn: tuple[tuple[int, int], RenderableType] | None = None

    def size(self) -> tuple[int, int]:
        """Return the current columns and lines. COLUMNS and LINES do not change when the terminal is resized."""
        try:
            size = os.get_terminal_size(self._output.fileno())
        except OSError:
            return (80, 24)
        return (size.columns or 80, size.lines or 24)

    def enter(self) -> None:
        """Switch to full-screen mode. Calling it again has no effect."""
        if self._modes is not None:
            return
        from rich.live import Live

        self._modes = termios.tcgetattr(self._keyboard)
        settings = {"screen": True, "auto_refresh": False, "redirect_stdout": False, "redirect_stderr": False}
        self._live = Live(plain(""), console=self._console, **settings)  # type: ignore[arg-type]
        tty.setcbreak(self._keyboard, termios.TCSADRAIN)
        self._live.start()
        self._console.file.write(_NO_WRAP)
        self._console.file.flush()

    def leave(self) -> None:
        """Restore the terminal if it is in full-screen mode. Never raises."""
        modes, self._modes = self._modes, None
        if modes is None:
            return
        # A terminal whose connection broke needs no restoration.
        with contextlib.suppress(OSError, ValueError):
            self._console.file.write(_WRAP)
            if self._live is not None:
                self._live.stop()
            self._console.file.flush()
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, modes)
        self._live = self._drawn = None

    def retake(self) -> None:
        """Set the terminal's modes again after this process was stopped."""
        if self._modes is not None:
            self.leave()
            self.enter()

    def draw(self, content: RenderableType) -> None:
        """Draw the content of the whole screen, if it or the size has changed."""
        from rich.console import ConsoleDimensions

        size = self.size()
        if self._live is None or self._drawn == (size, content):
            return
        self._console.size = ConsoleDimensions(*size)
        self._live.update(content, refresh=True)
        self._drawn = (size, content)

    def forget(self) -> None:
        """Make the next `draw` draw all lines."""
        self._drawn = None

    def in_foreground(self) -> bool:
        """Whether this process is in the terminal's foreground group."""
        try:
            return os.tcgetpgrp(self._keyboard) == os.getpgrp()
        except OSError:
            return True

    def suspend(self) -> None:
        """Restore the terminal and stop this process, as Ctrl-Z does. Returns after SIGCONT."""
        self.leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            signal.raise_signal(signal.SIGTSTP)
        finally:
            signal.signal(signal.SIGTSTP, handler)


class Signals:
    """Converts signals to flags and a byte in a pipe, because a signal handler must not draw.

    The main thread enters and exits it; any thread may call `notify`.
    """

    def __init__(self) -> None:
        self.ended: int | None = None
        """The signal that ends the program; None before one arrives."""
        self.suspended = False
        """Ctrl-Z was typed."""
        self.continued = False
        """The process was stopped and continues."""
        self.resized = False
        """The terminal has another size."""
        self._before: dict[int, Any] = {}
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

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
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


def exit_code_of(ended: int | None) -> int:
    """Return the exit code of a live command that the user or a signal ended. SIGTERM and SIGHUP end this process."""
    if ended is None:
        return 0
    if ended == signal.SIGINT:
        return INTERRUPTED
    # The sender of the signal sees that the signal ended this process.
    signal.signal(ended, signal.SIG_DFL)
    signal.raise_signal(signal.Signals(ended))
    return 128 + ended
