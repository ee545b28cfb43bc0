"""Work that no request triggers: chores once a second, errors restored at the start, and files read again on SIGHUP."""

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
from gpumem_exporter.core.last_ooms import MAX_SHOWN, SHOWN_SECONDS, LastOom
from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.events.event_log import EventLog
from gpumem_exporter.features.events.event_recorder import Recorder
from gpumem_exporter.features.events.process_events import process_subject
from gpumem_exporter.features.oom.oom_events import last_ooms
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


async def restore_ooms(
    store: Store, log: EventLog, *, clock: Callable[[], float], wall_clock: Callable[[], float]
) -> None:
    """Restore the out-of-memory errors of the last hour that an earlier run stored, and note which ended a process."""
    # An earlier exporter may still use the storage: until no stored error would be shown any more, this retries.
    end_seconds = clock() + SHOWN_SECONDS
    while clock() < end_seconds:
        try:
            since_unix_seconds = wall_clock() - SHOWN_SECONDS
            query = Query(since_unix_seconds=since_unix_seconds, types=("oom",), newest_of_each=True, limit=MAX_SHOWN)
            ooms = last_ooms(await log.pages(query), clock(), wall_clock())
            store.restore_ooms(ooms)
            without_end = [oom for oom in ooms if not await _has_stored_end(oom, store, log)]
            # By then each process that runs has reported again.
            await asyncio.sleep(store.report_expiry_seconds)
            snapshot = store.snapshot(clock())
            for oom in without_end:
                if _has_ended(oom, snapshot):
                    store.note_end(oom.session, oom.happened_seconds)
        except StorageError:
            await asyncio.sleep(RETRY_SECONDS)  # the event log has logged the error
        except Exception:  # noqa: BLE001 - the exporter works without them
            _log.exception("the out-of-memory errors before this start cannot be restored")
            return
        else:
            return


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


async def _has_stored_end(oom: LastOom, store: Store, log: EventLog) -> bool:
    """Return whether the end of an error's process is stored, and note it."""
    query = Query(types=("process_ended",), subject=process_subject(oom.session))
    for event in (await log.page(query)).events:
        last: float | None = event.detail["last_report_unix_seconds"]
        last_report_unix_seconds = oom.happened_unix_seconds if last is None else last
        store.note_end(oom.session, oom.happened_seconds + last_report_unix_seconds - oom.happened_unix_seconds)
        return True
    return False


def _has_ended(oom: LastOom, snapshot: Snapshot) -> bool:
    """Return whether an error's process neither reports nor is listed by the driver. False if that is not known."""
    node = snapshot.node
    if any(process.report.process.session == oom.session for process in snapshot.processes):
        return False
    if node is None or not node.up or not oom.pid.isdecimal():
        return False
    if any(device.processes is None for device in node.devices):
        return False
    if not any(listed.pid == int(oom.pid) for device in node.devices for listed in device.processes or ()):
        return True
    facts = node.facts.get(int(oom.pid))
    started_seconds = facts.started_seconds if facts is not None else None
    return started_seconds is not None and started_seconds > oom.happened_seconds  # the pid was reused


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
