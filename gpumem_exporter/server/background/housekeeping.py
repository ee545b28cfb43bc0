"""Work that no request triggers: chores once a second, and out-of-memory errors restored at the start."""

from __future__ import annotations

import asyncio
import ctypes
import logging
from collections.abc import Callable, Mapping

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.last_ooms import MAX_SHOWN, SHOWN_SECONDS
from gpumem_exporter.core.store import Store
from gpumem_exporter.events import EventLog, Query, last_ooms

__all__ = ["keep_house", "recall_ooms", "release_free_memory"]

INTERVAL_SECONDS = 1.0
RETRY_SECONDS = 1.0
RELEASE_SECONDS = 60.0

_log = logging.getLogger(__name__)


async def keep_house(chores: Mapping[str, Callable[[], None]]) -> None:
    """Run the chores once a second, until cancelled. A failing chore does not affect the others.

    Args:
        chores: the chores in their order, by name; a log line about an error has the name.
    """
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        for name, chore in chores.items():
            try:
                chore()
            except Exception:  # noqa: BLE001 - neither the other chores nor the next round may stop
                _log.exception("housekeeping failed", extra={"fields": {"chore": name}})


async def release_free_memory() -> None:
    """Return free memory to the operating system once a minute, until cancelled. Needs glibc.

    glibc keeps free pages that lie below live blocks. After a flood of requests these were tens of MiB for good.
    """
    try:
        malloc_trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError):
        return
    while True:
        await asyncio.sleep(RELEASE_SECONDS)
        await asyncio.to_thread(malloc_trim, 0)


async def recall_ooms(
    store: Store, log: EventLog, *, clock: Callable[[], float], wall_clock: Callable[[], float]
) -> None:
    """Restore the out-of-memory errors of the last hour that an earlier run stored.

    If the storage cannot be read, for example because an earlier exporter still uses it, this retries. It gives up when
    no stored error would be shown any more.

    Args:
        store: receives the errors.
        log: the stored events.
        clock: monotonic seconds.
        wall_clock: seconds of the Unix epoch.
    """
    end_seconds = clock() + SHOWN_SECONDS
    while clock() < end_seconds:
        try:
            since_unix_seconds = wall_clock() - SHOWN_SECONDS
            query = Query(since_unix_seconds=since_unix_seconds, types=("oom",), newest_of_each=True, limit=MAX_SHOWN)
            ooms = await log.pages(query)
        except StorageError:
            await asyncio.sleep(RETRY_SECONDS)  # the event log has logged the error
        except Exception:  # noqa: BLE001 - the exporter works without them
            _log.exception("the out-of-memory errors before this start cannot be restored")
            return
        else:
            store.restore_ooms(last_ooms(ooms, clock(), wall_clock()))
            return
