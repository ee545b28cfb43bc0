"""What an earlier run of the exporter kept and this one still shows."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import replace

from gpumem_exporter.core.last_ooms import MAX_SHOWN, SHOWN_SECONDS
from gpumem_exporter.errors import StorageError
from gpumem_exporter.events import Event, Query, last_ooms
from gpumem_exporter.server.api.event_writes import read_events
from gpumem_exporter.server.runtime import Runtime

__all__ = ["recall_ooms"]

RETRY_SECONDS = 1.0

_log = logging.getLogger(__name__)


async def recall_ooms(runtime: Runtime) -> None:
    """Show the out-of-memory errors of the last hour that are kept; nothing waits for this.

    A disk that cannot be read yet (the exporter before this one may still have it) is asked again, for as long as it
    can have anything to show.
    """
    end_seconds = runtime.clock() + SHOWN_SECONDS
    while runtime.clock() < end_seconds:
        try:
            await _recall(runtime)
        except StorageError:
            await asyncio.sleep(RETRY_SECONDS)  # the log says by itself what is wrong with it
        except Exception:  # noqa: BLE001 - the exporter is whole without them
            _log.exception("the out-of-memory errors before this start cannot be shown")
            return
        else:
            return


async def _recall(runtime: Runtime) -> None:
    query = Query(
        since_unix_seconds=runtime.wall_clock() - SHOWN_SECONDS, types=("oom",), newest_of_each=True, limit=MAX_SHOWN
    )
    kept: list[Event] = []
    while True:
        page = await read_events(runtime.events.log, query)
        kept += page.events
        if not page.more:
            break
        query = replace(query, after=page.next_after)
    # All together: the oldest come first, and would be shown for a moment though later ones push them out.
    runtime.store.restore_ooms(last_ooms(kept, runtime.clock(), runtime.wall_clock()))
