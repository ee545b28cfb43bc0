"""SIGHUP: read the policy and the web configuration again."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any

__all__ = ["reloading_on_hangup", "take_over_hangup"]


def take_over_hangup() -> None:
    """Block SIGHUP until `reloading_on_hangup` handles it, so that an early reload does not end the process.

    Call it in the main thread, before the files are read for the first time and before other threads start.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))  # a blocked signal stays pending, even if ignored


@contextlib.contextmanager
def reloading_on_hangup(reloads: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> Iterator[None]:
    """Run all reloads on SIGHUP, if the event loop runs in the main thread.

    Args:
        reloads: must not raise. If there are none, SIGHUP keeps its effect.
    """
    if not reloads or threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def reload_all() -> None:
        for reload in reloads:
            task = loop.create_task(reload())
            running.add(task)
            task.add_done_callback(running.discard)

    before = signal.getsignal(signal.SIGHUP)
    loop.add_signal_handler(signal.SIGHUP, reload_all)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        if before is not None:  # Python cannot restore a handler that it did not install
            signal.signal(signal.SIGHUP, before)
