"""SIGHUP: what was read from files is read again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

__all__ = ["reloading_on_hangup", "take_over_hangup"]


def take_over_hangup() -> None:
    """Have a SIGHUP wait for `reloading_on_hangup` instead of ending the process, and do nothing after it.

    Whoever starts an exporter and has it read its files at once would end it otherwise, and to a supervisor that is no
    failure. For a process of the exporter's own: call it in the main thread, before those files are read for the first
    time and before there are other threads.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))  # one that is blocked is kept, ignored or not


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

    before = signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, reload_all)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        if before is not None:  # a handler that Python did not install cannot be put back
            signal.signal(signal.SIGHUP, before)
