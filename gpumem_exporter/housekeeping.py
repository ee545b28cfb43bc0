"""Work that no request triggers: chores once a second, on the event loop or in a thread, and files read on SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.node.failures import FailureLog

INTERVAL_SECONDS = 1.0
_MIN_WAIT_SECONDS = 0.05
_STOP_SECONDS = 0.5
RELEASE_SECONDS = 60.0

_log = logging.getLogger(__name__)


def _run(chores: Mapping[str, Callable[..., object]], failures: FailureLog, *given: Snapshot) -> None:
    """Run the chores in their order. A failing chore does not affect the others."""
    for name, chore in chores.items():
        try:
            chore(*given)
        except Exception as error:  # noqa: BLE001 - neither the other chores nor the next round may stop
            failures.failed(name, repr(error), exc_info=True)
        else:
            failures.recovered(name)


async def keep_house(chores: Mapping[str, Callable[[], object]]) -> None:
    """Run the chores on the event loop once a second, until cancelled."""
    failures = FailureLog(_log, time.monotonic)
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        _run(chores, failures)


@contextlib.contextmanager
def keeping_records(
    snapshot: Callable[[], Snapshot],
    chores: Mapping[str, Callable[[Snapshot], None]],
    *,
    clock: Callable[[], float],
    wall_clock: Callable[[], float],
) -> Iterator[None]:
    """Take a snapshot once a second, and run the chores with it, in a thread, until the block ends.

    The last second has half a second for its work; a chore that takes longer is abandoned.
    """
    failures = FailureLog(_log, time.monotonic)
    origin_seconds = wall_clock() - clock()
    stopped = threading.Event()

    def seconds_to_next() -> float:
        # Until the middle of the next second, so that a delay leaves no second without a row of the history.
        return max((0.5 - clock() - origin_seconds) % 1.0, _MIN_WAIT_SECONDS)

    def run() -> None:
        while not stopped.wait(seconds_to_next()):
            _run({"snapshot": lambda: _run(chores, failures, snapshot())}, failures)

    # A daemon, and no pool: Python waits for the threads of a pool at its exit, however long a chore hangs.
    thread = threading.Thread(target=run, name="gpumem-second", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join(_STOP_SECONDS)


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
