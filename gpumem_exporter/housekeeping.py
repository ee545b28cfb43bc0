"""Work that no request triggers: chores once a second, and files read on SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

INTERVAL_SECONDS = 1.0
RELEASE_SECONDS = 60.0

_log = logging.getLogger(__name__)


async def keep_house(chores: Mapping[str, Callable[[], None]]) -> None:
    """Run the chores in their order once a second, until cancelled. A failing chore does not affect the others."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        for name, chore in chores.items():
            try:
                chore()
            except Exception:  # noqa: BLE001 - neither the other chores nor the next round may stop
                _log.exception("housekeeping failed", extra={"fields": {"chore": name}})


async def release_free_memory() -> None:
    """Return free memory to the operating system once a minute, until cancelled. Needs glibc."""
    # glibc keeps free pages that lie below live blocks. After a flood of requests these were tens of MiB for good.
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    while True:
        await asyncio.sleep(RELEASE_SECONDS)
        await asyncio.to_thread(malloc_trim, 0)


@contextlib.contextmanager
def keeping_hangup() -> Iterator[None]:
    """Keep SIGHUP pending until `reloading_on_hangup` handles it, so that an early reload does not end the process.

    Enter it in the main thread, before the files are read for the first time and before other threads start.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)  # programs that start later inherit it


@contextlib.contextmanager
def reloading_on_hangup(reloads: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> Iterator[None]:
    """Unblock SIGHUP, which runs all reloads. They must not raise. Without reloads, SIGHUP keeps its effect.

    Does nothing if the event loop does not run in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    running: set[asyncio.Task[None]] = set()

    def reload_all() -> None:
        for reload in reloads:
            task = loop.create_task(reload())
            running.add(task)
            task.add_done_callback(running.discard)

    if reloads:
        loop.add_signal_handler(signal.SIGHUP, reload_all)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
    try:
        yield
    finally:
        if reloads:
            loop.remove_signal_handler(signal.SIGHUP)
            signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload during the stop would end the process
