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
from queue import SimpleQueue
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from gpumem_exporter.cli.fleet.overview import Overview
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.errors import GpumemError

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["show_live"]

_KEY_WAIT_SECONDS = 0.1


def show_live(read: Callable[[], Overview], *, interval_seconds: float) -> None:
    """Show the result of `read` every `interval_seconds` until the user types q.

    If a later reading fails, its error is shown above the last overview.

    Raises:
        GpumemError: the first reading failed.
    """
    from rich.console import Console, Group
    from rich.live import Live

    overview, error = read(), ""
    updates: SimpleQueue[Overview | GpumemError] = SimpleQueue()
    arguments = (read, interval_seconds, updates)
    threading.Thread(target=_read_repeatedly, args=arguments, name="gpumem-fleet-top", daemon=True).start()
    console = Console(highlight=False, markup=False, emoji=False)
    with _keys() as keyboard, Live(console=console, screen=True, auto_refresh=False) as live:
        size = None
        while not _quit(keyboard):
            update = None if updates.empty() else updates.get()
            if update is None and console.size == size:
                continue
            size = console.size
            if isinstance(update, Overview):
                overview, error = update, ""
            elif update is not None:
                error = str(update)
            live.update(Group(*_frame(overview, error)), refresh=True)


def _read_repeatedly(
    read: Callable[[], Overview], interval_seconds: float, updates: SimpleQueue[Overview | GpumemError]
) -> None:
    """Read in a thread of its own, so that keys work while a node does not answer."""
    while True:
        time.sleep(interval_seconds)
        try:
            updates.put(read())
        except GpumemError as error:
            updates.put(error)


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
