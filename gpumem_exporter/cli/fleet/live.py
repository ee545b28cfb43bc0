"""The devices of a fleet live on a terminal, until q or Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import termios
import threading
import time
import tty
from collections.abc import Callable, Iterator
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from gpumem_exporter.cli.fleet.overview import Overview
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.errors import ConfigurationError, GpumemError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["require_terminal", "show_live"]

_KEY_WAIT_SECONDS = 0.1


def require_terminal() -> None:
    """Check that input and output are a terminal that can move its cursor.

    Raises:
        ConfigurationError: they are not; the message names the alternative.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError("input and output must be a terminal; without one, use `fleet info`")
    if os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        raise ConfigurationError("this terminal cannot move its cursor (TERM); use `fleet info`")


def show_live(read: Callable[[], Overview], *, interval_seconds: float) -> None:
    """Show the result of `read` every `interval_seconds` until the user types q.

    If a later reading fails, its error is shown above the last overview.

    Raises:
        GpumemError: the first reading failed.
    """
    from rich.console import Console, Group
    from rich.live import Live

    background = _Background(read, interval_seconds)
    overview = read()
    background.start()
    console = Console(highlight=False, markup=False, emoji=False)
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        error = ""
        size = console.size
        live.update(Group(*_frame(overview, error)), refresh=True)
        while not _quit(keyboard):
            news = background.take()
            if news is None and console.size == size:
                continue
            size = console.size
            if isinstance(news, Overview):
                overview, error = news, ""
            elif news is not None:
                error = str(news)
            live.update(Group(*_frame(overview, error)), refresh=True)


class _Background:
    """Reads in a thread, so that keys work while a node does not answer."""

    def __init__(self, read: Callable[[], Overview], interval_seconds: float) -> None:
        self._read = read
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._news: Overview | GpumemError | None = None

    def start(self) -> None:
        """Start the thread, which runs until the program exits."""
        threading.Thread(target=self._run, name="gpumem-fleet-top", daemon=True).start()

    def take(self) -> Overview | GpumemError | None:
        """Return the overview or the error since the last call; None if there is no new one."""
        with self._lock:
            news, self._news = self._news, None
        return news

    def _run(self) -> None:
        while True:
            time.sleep(self._interval_seconds)
            news: Overview | GpumemError
            try:
                news = self._read()
            except GpumemError as error:
                news = error
            with self._lock:
                self._news = news


def _frame(overview: Overview, error: str) -> Iterator[RenderableType]:
    yield plain(f"{time.strftime('%H:%M:%S')}  q quits", "dim")
    if error:
        yield plain(error, "bold red")
    yield from overview.screen()


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """The keyboard without line buffering and echo. Its modes are restored, also after a signal."""
    keyboard = sys.stdin.fileno()
    modes = termios.tcgetattr(keyboard)

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # A shell may start background jobs with SIGINT ignored.
    handlers = {number: signal.signal(number, end) for number in ending}
    try:
        tty.setcbreak(keyboard, termios.TCSADRAIN)
        without_stop = termios.tcgetattr(keyboard)
        without_stop[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on the alternate screen.
        termios.tcsetattr(keyboard, termios.TCSADRAIN, without_stop)
        yield keyboard
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)


def _quit(keyboard: int) -> bool:
    """Whether the user typed q; waits up to 0.1 s for a key."""
    ready, _, _ = select.select([keyboard], [], [], _KEY_WAIT_SECONDS)
    if not ready:
        return False
    typed = os.read(keyboard, 64)
    return not typed or b"q" in typed.lower()
