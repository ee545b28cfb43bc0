"""A Textual application that shows nodes, which a thread reads again and again."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar, Protocol, TypeVar

from rich.traceback import Traceback
from textual.app import App
from textual.binding import Binding, BindingType

from gpumem_client.wire.errors import GpumemError
from gpumem_exporter.cli.node import Node
from gpumem_exporter.cli.program import INTERRUPTED
from gpumem_exporter.cli.render.terminal import open_console

T = TypeVar("T")

_LATE_SECONDS = 4.0
"""If a reading takes longer than this, its values are no longer current."""
_TICK_SECONDS = 1.0
"""Without a new reading, the screen is drawn this often, because the values may no longer be current."""


class NodeSource(Protocol):
    """One exporter, or the exporters of a fleet."""

    warnings: tuple[str, ...]

    def read(self) -> list[Node]:
        """Read the nodes. Raises GpumemError if there is nothing to read."""


class LiveApp(App[None]):
    """Shows the last reading of nodes, which is read in a thread, because it may block."""

    ENABLE_COMMAND_PALETTE = False
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("ctrl+c", "interrupt", show=False, priority=True),
        Binding("ctrl+z", "suspend_process", show=False, priority=True),
    ]

    def __init__(self, source: NodeSource, first: list[Node], *, interval_seconds: float) -> None:
        super().__init__()
        self.theme = "ansi-dark"  # the terminal's own colors
        self.interval_seconds = interval_seconds
        self.ended: int | None = None
        """The signal that ended the program; None for `q`."""
        self.source, self._last_nodes = source, first
        self._answered_seconds = time.monotonic()
        self._failure = ""

    @property
    def nodes(self) -> list[Node]:
        """The nodes, each with the reason why its values are no longer current."""
        late_seconds = time.monotonic() - self._answered_seconds
        failure = self._failure
        if late_seconds > self.interval_seconds + _LATE_SECONDS:
            failure = failure or f"no answer for {late_seconds:.0f} s"
        return [replace(node, error=failure) for node in self._last_nodes] if failure else self._last_nodes

    @abstractmethod
    def show(self) -> None:
        """Draw the reading."""

    def on_mount(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, self._end, number)
        # After Ctrl-Z the terminal's screen is empty, and Textual draws only what changes.
        self.app_resume_signal.subscribe(self, lambda _: self.screen.refresh(layout=True))
        self.set_interval(_TICK_SECONDS, self._tick)
        self.run_worker(self._watch())
        self.call_after_refresh(self.show)

    def on_resize(self) -> None:
        self.call_after_refresh(self.show)

    def action_interrupt(self) -> None:  # Textual reads Ctrl-C as a key, not as a signal
        self._end(signal.SIGINT)

    def run_to_end(self) -> int:
        """Run until the user quits, and return the exit code. SIGTERM and SIGHUP end this process."""
        for name in ("COLUMNS", "LINES"):
            # Textual prefers them to the terminal's size, and they do not change with the window.
            os.environ.pop(name, None)
        open_console(sys.stderr)  # Textual writes to stderr; a terminal without a character gets a similar one
        self.run()
        if self.ended is None:
            return self.return_code or 0
        if self.ended == signal.SIGINT:
            return INTERRUPTED
        _die(self.ended)
        return 128 + self.ended

    def _fatal_error(self) -> None:
        # Textual would print the local variables of each frame, and a token may be among them.
        self.panic(Traceback(width=None))

    def _tick(self) -> None:
        if time.monotonic() - self._answered_seconds > _TICK_SECONDS:
            self.show()

    def _end(self, number: int) -> None:
        if number == signal.SIGHUP and not os.isatty(0):
            _die(number)  # the terminal is closed: Textual would wait for its output
        self.ended = number
        self.exit()

    async def _watch(self) -> None:
        due = self._answered_seconds
        while True:
            due = max(due + self.interval_seconds, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            try:
                self._last_nodes = await in_daemon_thread(self.source.read)
                self._failure, self._answered_seconds = "", time.monotonic()
            except GpumemError as error:
                self._failure = str(error)
            self.show()


async def in_daemon_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`. Unlike `asyncio.to_thread`, it does not delay the exit while `work` hangs."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def finish(result: T | None, error: BaseException | None) -> None:
        if not done.cancelled():
            done.set_exception(error) if error else done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, error = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - the waiting task raises it
            error = raised
        with contextlib.suppress(RuntimeError):  # the program has ended
            loop.call_soon_threadsafe(finish, result, error)

    threading.Thread(target=run, name="gpumem-live", daemon=True).start()
    return await done


def _die(number: int) -> None:
    """End this process by a signal, so that the sender sees that the signal ended it."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
