"""The terminal while `top` has it: another screen, keys without Enter, and everything as it was afterwards."""

from __future__ import annotations

import contextlib
import os
import signal
import termios
import tty
from typing import IO, TYPE_CHECKING, Any

from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.cells import whole

if TYPE_CHECKING:
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

__all__ = ["Screen"]

_NO_WRAP, _WRAP = "\x1b[?7l", "\x1b[?7h"
"""Whether the terminal wraps lines: it must not while it is being resized."""


class Screen:
    """A terminal in `top`'s hands. One thread uses it.

    Args:
        output: a terminal, which is drawn on.
        keyboard: the file descriptor of the terminal that is typed on.
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
        """The terminal's modes before `enter`; None outside of it."""
        self._drawn: tuple[tuple[int, int], list[Text]] | None = None

    @property
    def unicode_output(self) -> bool:
        """More than ASCII can be shown."""
        return self._console.encoding.lower().startswith("utf")

    def size(self) -> tuple[int, int]:
        """Columns and lines of the terminal now; COLUMNS and LINES do not change with them."""
        try:
            size = os.get_terminal_size(self._output.fileno())
        except OSError:
            return (80, 24)
        return (size.columns or 80, size.lines or 24)

    def enter(self) -> None:
        """Take the terminal. Does nothing while it is taken."""
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
        """Restore the terminal. Does nothing outside of `enter`; never raises."""
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
        """Show these lines, `size()` of them; the same again costs nothing."""
        from rich.console import ConsoleDimensions

        size = self.size()
        if self._live is None or self._drawn == (size, lines):
            return
        self._console.size = ConsoleDimensions(*size)
        self._live.update(whole(lines), refresh=True)
        self._drawn = (size, lines)

    def forget(self) -> None:
        """What is on the screen is not known: the next `draw` draws."""
        self._drawn = None

    def in_foreground(self) -> bool:
        """The terminal's keys are for this process' group."""
        try:
            return os.tcgetpgrp(self._keyboard) == os.getpgrp()
        except OSError:
            return True

    def suspend(self) -> None:
        """Restore the terminal and stop this process, as Ctrl-Z does. Returns after SIGCONT, outside of `enter`."""
        self.leave()
        handler = signal.signal(signal.SIGTSTP, signal.SIG_DFL)
        try:
            signal.raise_signal(signal.SIGTSTP)
        finally:
            signal.signal(signal.SIGTSTP, handler)
