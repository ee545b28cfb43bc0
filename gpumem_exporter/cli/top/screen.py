"""The terminal of `top`: the alternate screen, keys without Enter, and restoration."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import tty
from typing import IO, TYPE_CHECKING, Any

from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.cells import join_lines

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

__all__ = ["Screen"]

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""Wrapping is off, because a terminal wraps lines while it is resized."""


class Screen:
    """A terminal in full-screen mode. Not thread-safe.

    Args:
        output: the terminal.
        keyboard: the file descriptor of the keyboard's terminal.
    """

    def __init__(self, output: IO[str], keyboard: int) -> None:
        from rich.console import Console

        self._output = output
        self._keyboard = keyboard
        self._console: Console = Console(
            file=output, force_terminal=True, force_interactive=True, highlight=False, markup=False, emoji=False
        )
        self._live: Live | None = None
        self._modes: list[Any] | None = None
        """The terminal's modes before `enter`; None if it is not in full-screen mode."""
        self._drawn: tuple[tuple[int, int], list[Text]] | None = None

    @property
    def unicode_output(self) -> bool:
        """Whether the terminal shows more than ASCII."""
        return self._console.encoding.lower().startswith("utf")

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
        self._live = Live(
            plain(""),
            console=self._console,
            screen=True,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
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
        with contextlib.suppress(OSError, ValueError):
            if self._live is not None:
                self._live.stop()
        with contextlib.suppress(OSError, ValueError):
            self._console.file.flush()
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(self._keyboard, termios.TCSADRAIN, modes)
        self._live = self._drawn = None

    def retake(self) -> None:
        """Set the terminal's modes again after this process was stopped."""
        if self._modes is not None:
            self.leave()
            self.enter()

    def draw(self, lines: list[Text]) -> None:
        """Draw the lines of a whole screen, if they or the size have changed."""
        from rich.console import ConsoleDimensions

        size = self.size()
        if self._live is None or self._drawn == (size, lines):
            return
        self._console.size = ConsoleDimensions(*size)
        self._live.update(join_lines(lines), refresh=True)
        self._drawn = (size, lines)

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
