"""Work that no request triggers: chores once a second, ends of processes before a start, and files read on SIGHUP."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import Event, Query
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.events.event_recorder import Recorder
from gpumem_exporter.node.host import Host

INTERVAL_SECONDS = 1.0
RETRY_SECONDS = 1.0
RELEASE_SECONDS = 60.0
_STARTS_WITHOUT_END = Query(after=0, types=("process_started",), last_of_subject=True, limit=1000)
# After a reboot, every process has ended. The queue of events has room for more of one user.
_MAX_ENDS = 256

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


async def restore_ends(
    recorder: Recorder, store: Store, host: Host, *, clock: Callable[[], float], silent_seconds: float
) -> None:
    """Record the ends of the processes that reported to an earlier run and ended while no exporter ran.

    A process that the exporter cannot see has ended if it does not report for `silent_seconds`.
    """
    silent_at_seconds = clock() + silent_seconds

    def has_ended(event: Event) -> bool:
        host_pid = event.detail["host_pid"]
        if host_pid is None:
            return clock() >= silent_at_seconds
        return not host.alive(host_pid, event.detail["start_time_ticks"])

    started: list[Event] = []
    while clock() < silent_at_seconds:
        try:
            started = await recorder.log.pages(_STARTS_WITHOUT_END)
            break
        except StorageError:
            await asyncio.sleep(RETRY_SECONDS)  # an earlier exporter may still use the storage
    # An earlier version did not record the start time, without which a pid is no process.
    started = [event for event in started if "start_time_ticks" in event.detail]
    while started:
        await asyncio.sleep(store.report_expiry_seconds)  # by then each process that runs has reported again
        reported = recorder.reported()
        started = [event for event in started if event.subject not in reported]
        ended = [event for event in started if has_ended(event)][:_MAX_ENDS]
        recorder.ended_unseen(ended)
        started = [event for event in started if event not in ended]


def take_over_hangup() -> None:
    """Block SIGHUP until `reloading_on_hangup` handles it, so that an early reload does not end the process.

    Call it in the main thread, before the files are read for the first time and before other threads start.
    """
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGHUP,))  # a blocked signal stays pending, even if ignored


@contextlib.contextmanager
def reloading_on_hangup(reloads: Sequence[Callable[[], Coroutine[Any, Any, None]]]) -> Iterator[None]:
    """Run all reloads, which must not raise, on SIGHUP, if the event loop runs in the main thread.

    Without reloads, SIGHUP keeps its effect.
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

    loop.add_signal_handler(signal.SIGHUP, reload_all)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGHUP,))
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGHUP)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a reload during the stop would end the process
