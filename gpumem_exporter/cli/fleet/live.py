"""The devices of a fleet on a terminal, drawn again and again, until q or Ctrl-C; the terminal is as before then."""

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

__all__ = ["need_terminal", "show_live"]

_LOOK_SECONDS = 0.1


def need_terminal() -> None:
    """Raise unless this is a terminal that can be drawn on, and typed on.

    Raises:
        ConfigurationError: says what to use instead.
    """
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise ConfigurationError("input and output must be a terminal; for anything else there is `fleet info`")
    if os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        raise ConfigurationError("this terminal cannot move its cursor (TERM); use `fleet info`")


def show_live(read: Callable[[], Overview], *, interval_seconds: float) -> None:
    """Show what `read` gives every `interval_seconds`, until q is typed.

    Where a later reading fails, that is said above what was read before.

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
        trouble = ""
        size = console.size
        live.update(Group(*_frame(overview, trouble)), refresh=True)
        while not _quit(keyboard):
            news = background.take()
            if news is None and console.size == size:
                continue
            size = console.size
            if isinstance(news, Overview):
                overview, trouble = news, ""
            elif news is not None:
                trouble = str(news)
            live.update(Group(*_frame(overview, trouble)), refresh=True)


class _Background:
    """Reads again and again in a thread, so that a key is heeded while a node does not answer."""

    def __init__(self, read: Callable[[], Overview], interval_seconds: float) -> None:
        self._read = read
        self._interval_seconds = interval_seconds
        self._lock = threading.Lock()
        self._news: Overview | GpumemError | None = None

    def start(self) -> None:
        """Begin; it ends with the program."""
        threading.Thread(target=self._run, name="gpumem-fleet-top", daemon=True).start()

    def take(self) -> Overview | GpumemError | None:
        """What was read since this was asked last."""
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


def _frame(overview: Overview, trouble: str) -> Iterator[RenderableType]:
    yield plain(f"{time.strftime('%H:%M:%S')}  q quits", "dim")
    if trouble:
        yield plain(trouble, "bold red")
    yield from overview.screen()


@contextlib.contextmanager
def _keys() -> Iterator[int]:
    """The keyboard without Enter and echo, and its modes as before afterwards, whatever ends this program."""
    keyboard = sys.stdin.fileno()
    modes = termios.tcgetattr(keyboard)

    def end(number: int, _: FrameType | None) -> NoReturn:
        raise SystemExit(128 + number)

    ending = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # the first may come ignored, as from a script that uses &
    handlers = {number: signal.signal(number, end) for number in ending}
    try:
        tty.setcbreak(keyboard, termios.TCSADRAIN)
        without_stop = termios.tcgetattr(keyboard)
        without_stop[6][termios.VSUSP] = b"\0"  # Ctrl-Z would leave the shell on the other screen
        termios.tcsetattr(keyboard, termios.TCSADRAIN, without_stop)
        yield keyboard
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError, termios.error):
            termios.tcsetattr(keyboard, termios.TCSADRAIN, modes)


def _quit(keyboard: int) -> bool:
    """Whether q was typed; waits a moment for it."""
    ready, _, _ = select.select([keyboard], [], [], _LOOK_SECONDS)
    if not ready:
        return False
    typed = os.read(keyboard, 64)
    return not typed or b"q" in typed.lower()
