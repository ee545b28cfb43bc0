"""Ctrl-C as a flag, while a command must not lose the id of what it has requested."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType


class Interrupts:
    """Within the block, the first Ctrl-C sets `requested`, and the second one raises KeyboardInterrupt.

    In a thread besides the main one, and where Ctrl-C is ignored or has another handler, the block changes nothing.
    """

    def __init__(self) -> None:
        self.requested = False
        self._takes = False

    def __enter__(self) -> Interrupts:
        main = threading.current_thread() is threading.main_thread()
        self._takes = main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if self._takes:
            signal.signal(signal.SIGINT, self._take)
        return self

    def __exit__(self, *exception: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._takes:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            signal.default_int_handler(number, frame)
        self.requested = True
