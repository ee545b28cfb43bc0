"""SIGHUP: what was read from files is read again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

__all__ = ["reloading_on_hangup"]


@contextlib.contextmanager
def reloading_on_hangup(reloads: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> Iterator[None]:
    """Run each of these for a SIGHUP; in a process whose main thread runs the event loop.

    Args:
        reloads: must not raise; without any, SIGHUP is left to do what it does.
    """
    if not reloads or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    under_way: set[asyncio.Task[None]] = set()

    def reload_all() -> None:
        for reload in reloads:
            task = loop.create_task(reload())
            under_way.add(task)
            task.add_done_callback(under_way.discard)

    loop.add_signal_handler(signal.SIGHUP, reload_all)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
