"""Work that no request triggers: chores once a second, and the restoring of out-of-memory errors at the start."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from gpumem_exporter.core.last_ooms import MAX_SHOWN, SHOWN_SECONDS
from gpumem_exporter.errors import StorageError
from gpumem_exporter.events import Event, Query, last_ooms
from gpumem_exporter.server.api.event_writes import read_events
from gpumem_exporter.server.runtime import Runtime

__all__ = ["keep_house", "recall_ooms"]

INTERVAL_SECONDS = 1.0
RETRY_SECONDS = 1.0

_log = logging.getLogger(__name__)


async def keep_house(runtime: Runtime) -> None:
    """Run the chores once a second, until cancelled. A failing chore does not affect the others."""
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        for chore in (
            _expire_actions,
            _remove_ended_processes,
            _record_expired_reports,
            _record_history,
            _run_policies,
        ):
            try:
                chore(runtime)
            except Exception:  # noqa: BLE001 - neither the other chores nor the next round may stop
                _log.exception("housekeeping failed", extra={"fields": {"chore": chore.__name__.strip("_")}})


def _expire_actions(runtime: Runtime) -> None:
    runtime.dispatcher.expire()


def _remove_ended_processes(runtime: Runtime) -> None:
    runtime.presence.sweep()


def _record_expired_reports(runtime: Runtime) -> None:
    runtime.events.sweep(runtime.snapshot())


def _record_history(runtime: Runtime) -> None:
    runtime.history.take(runtime.snapshot())


def _run_policies(runtime: Runtime) -> None:
    if runtime.policies is not None:
        runtime.policies.tick()


async def recall_ooms(runtime: Runtime) -> None:
    """Restore the stored out-of-memory errors of the last hour; nothing waits for this.

    Retries while the storage cannot be read (an earlier exporter may still have it), for as long as its errors would be
    shown.
    """
    end_seconds = runtime.clock() + SHOWN_SECONDS
    while runtime.clock() < end_seconds:
        try:
            ooms = await _stored_ooms(runtime)
        except StorageError:
            await asyncio.sleep(RETRY_SECONDS)  # the event log has logged the error
        except Exception:  # noqa: BLE001 - the exporter works without them
            _log.exception("the out-of-memory errors before this start cannot be restored")
            return
        else:
            runtime.store.restore_ooms(last_ooms(ooms, runtime.clock(), runtime.wall_clock()))
            return


async def _stored_ooms(runtime: Runtime) -> list[Event]:
    """Read all pages before any error is restored, because the first page has the oldest errors."""
    since = runtime.wall_clock() - SHOWN_SECONDS
    query = Query(since_unix_seconds=since, types=("oom",), newest_of_each=True, limit=MAX_SHOWN)
    ooms: list[Event] = []
    while True:
        page = await read_events(runtime.events.log, query)
        ooms += page.events
        if not page.more:
            return ooms
        query = replace(query, after=page.next_after)
