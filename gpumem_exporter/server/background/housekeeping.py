"""What is done once a second, whatever comes in."""

from __future__ import annotations

import asyncio
import logging

from gpumem_exporter.server.runtime import Runtime

__all__ = ["keep_house"]

INTERVAL_SECONDS = 1.0

_log = logging.getLogger(__name__)


async def keep_house(runtime: Runtime) -> None:
    """Give up late actions, forget processes that have gone, tell so, remember the devices, and follow the policy."""

    def tell_who_is_silent() -> None:
        runtime.events.sweep(runtime.snapshot())

    def remember_the_devices() -> None:
        runtime.history.take(runtime.snapshot())

    chores = [runtime.dispatcher.expire, runtime.presence.sweep, tell_who_is_silent, remember_the_devices]
    if runtime.policies is not None:
        chores.append(runtime.policies.tick)
    while True:
        await asyncio.sleep(INTERVAL_SECONDS)
        for chore in chores:
            try:
                chore()
            except Exception:  # noqa: BLE001 - one chore's failure must end neither the other nor the next round
                _log.exception("housekeeping failed", extra={"fields": {"chore": chore.__name__}})
