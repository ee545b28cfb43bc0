"""The loop of the live `top`: waits for keys, signals and answers, and draws the screen."""

from __future__ import annotations

import os
import select
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpumem_exporter.cli.top.cells import join_lines
from gpumem_exporter.cli.top.clearing import Clearing, OpenApi
from gpumem_exporter.cli.top.frame import Display, draw
from gpumem_exporter.cli.top.keys import KeyReader
from gpumem_exporter.cli.top.screen import Screen, Signals
from gpumem_exporter.cli.top.view import View
from gpumem_exporter.cli.top.watcher import Watcher

if TYPE_CHECKING:
    from gpumem_exporter.cli.top.source import Reading, Source

__all__ = ["run"]

_TICK_SECONDS = 1.0
"""The screen is drawn at least this often, because the shown ages change."""
_KEY_ENDS_SECONDS = 0.05
"""Bytes that arrive later than this belong to another key."""


def run(
    source: Source,
    first: Reading,
    view: View,
    *,
    interval_seconds: float,
    screen: Screen,
    keyboard: int,
    open_api: OpenApi,
) -> int | None:
    """Show the source until the user quits or a signal arrives, and restore the terminal.

    Returns:
        The signal that ended it; None for `q`.
    """
    with Signals() as signals:
        watcher = Watcher(source.read, first, interval_seconds=interval_seconds, notify=signals.notify)
        watcher.start()
        try:
            screen.enter()
            clearing = Clearing(open_api, signals.notify)
            return _Loop(watcher, signals, screen, clearing, interval_seconds, view).run(keyboard)
        finally:
            screen.leave()
            if watcher.stop():
                source.close()


@dataclass
class _Loop:
    watcher: Watcher[Reading]
    signals: Signals
    screen: Screen
    clearing: Clearing
    interval_seconds: float
    view: View
    keys: KeyReader = field(default_factory=KeyReader)
    page: int = 0
    quits: bool = False

    def run(self, keyboard: int) -> int | None:
        """Run until the user quits; return the signal that ended the loop, if any."""
        while not self.quits and self.signals.ended is None:
            if not self._handle_signals():
                break
            self._draw()
            timeout = _KEY_ENDS_SECONDS if self.keys.incomplete else _TICK_SECONDS
            ready, _, _ = select.select([keyboard, self.signals.pipe], [], [], timeout)
            self.signals.drain()
            if keyboard in ready:
                self._read_keys(keyboard)
            elif self.keys.incomplete:
                self._press(self.keys.flush())
        return self.signals.ended

    def _read_keys(self, keyboard: int) -> None:
        try:
            typed = os.read(keyboard, 4096)
        except OSError:
            typed = b""
        if not typed:
            # The terminal is closed.
            self.signals.ended = self.signals.ended or signal.SIGHUP
        self._press(self.keys.feed(typed))

    def _handle_signals(self) -> bool:
        """Handle the received signals. Return False if one of them ends the program."""
        signals = self.signals
        while signals.suspended and signals.ended is None:
            signals.suspended = False
            self.screen.suspend()
            # A background process must not draw until the shell moves it to the foreground.
            signals.suspended = not self.screen.in_foreground()
            signals.continued = False
            if not signals.suspended:
                self.screen.enter()
        if signals.continued:
            signals.continued = False
            self.screen.retake()
        if signals.resized:
            signals.resized = False
            self.screen.forget()
        return signals.ended is None

    def _draw(self) -> None:
        now = time.monotonic()
        known = self.watcher.known
        age_seconds = max(0.0, now - known.answered_seconds)
        lost = known.lost(now, self.interval_seconds)
        display = Display(known.reading, age_seconds, lost=lost, note=self.clearing.note())
        frame = draw(display, self.view, *self.screen.size())
        self.view, self.page = frame.view, frame.page
        try:
            self.screen.draw(join_lines(frame.lines))
        except OSError:
            # The terminal is closed; its signal may arrive later.
            self.signals.ended = self.signals.ended or signal.SIGHUP

    def _press(self, keys: tuple[str, ...]) -> None:
        for key in keys:
            note = self.clearing.note()
            known = self.watcher.known
            listed = self.view.rows(known.reading.rows)
            if note is not None and note.asks:
                self.clearing.answer(yes=key in ("y", "Y"))
            elif key == "redraw":
                self.screen.forget()
            elif self.view.typing is None and key == "q":
                self.quits = True
            elif self.view.typing is None and self.view.lists_processes and key == "c":
                lost = bool(known.lost(time.monotonic(), self.interval_seconds))
                row = next((row for row in listed if row.identity == self.view.chosen), None)
                self.clearing.ask(row, "" if lost else known.reading.url)
            else:
                self.clearing.dismiss()
                self.view = self.view.press(key, listed, self.page)
