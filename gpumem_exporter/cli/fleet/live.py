"""The devices of a fleet live on a terminal, until q or a signal."""

from __future__ import annotations

import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from gpumem_exporter.cli.fleet.overview import Overview
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.screen import Screen, Signals, exit_code_of
from gpumem_exporter.cli.top.watcher import Known, Watcher

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["show_live"]

_TICK_SECONDS = 1.0


def show_live(read: Callable[[], Overview], *, interval_seconds: float) -> int:
    """Show the result of `read` every `interval_seconds` until the user types q. Return the exit code.

    If a later reading fails, its error is shown above the last overview.

    Raises:
        GpumemError: the first reading failed.
    """
    from rich.console import Group

    first, keyboard = read(), sys.stdin.fileno()
    screen = Screen(sys.stdout, keyboard)
    with Signals() as signals:
        watcher = Watcher(read, first, interval_seconds=interval_seconds, notify=signals.notify)
        watcher.start()
        screen.enter()
        try:
            while signals.ended is None:
                screen.draw(Group(*_frame(watcher.known)))
                ready, _, _ = select.select([keyboard, signals.pipe], [], [], _TICK_SECONDS)
                signals.drain()
                if keyboard in ready and _quits(os.read(keyboard, 64)):
                    break
        finally:
            screen.leave()
            watcher.stop(timeout_seconds=0)
    return exit_code_of(signals.ended)


def _frame(known: Known[Overview]) -> Iterator[RenderableType]:
    answered = time.localtime(time.time() - (time.monotonic() - known.answered_seconds))
    yield plain(f"{time.strftime('%H:%M:%S', answered)}  q quits", "dim")
    if known.failure:
        yield plain(known.failure, "bold red")
    yield from known.reading.screen()


def _quits(typed: bytes) -> bool:
    """Whether the user typed q, or the terminal is closed."""
    return not typed or b"q" in typed.lower()
