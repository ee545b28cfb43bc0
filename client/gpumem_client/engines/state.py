"""The state of the engine in this process over time: starting, serving, idle or asleep."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable

from gpumem_client.engines.facts import EngineFacts
from gpumem_client.guest_safety import log
from gpumem_client.wire.protocol import EngineState

# An engine serves until it has had no request for this time.
_SERVING_SECONDS = 10.0


class EngineClock:
    """Follows one engine from report to report. For one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._allocations: Hashable = None
        self._active_seconds: float | None = None
        self._logged: str | None = None

    def state(self, facts: EngineFacts | None, *, asleep: bool, allocations: Hashable) -> EngineState | None:
        """Return the state to report now; None without an engine.

        `allocations` changes when the allocator of the process allocates: a short request may have come and gone since
        the last report. None if it is not known.
        """
        now = self._clock()
        starting = facts is not None and (facts.measures is True or facts.ready is False)
        changed = allocations is not None and allocations != self._allocations
        if self._active_seconds is None or starting or changed or (facts is not None and facts.requests):
            self._active_seconds = now
        self._allocations = self._allocations if allocations is None else allocations
        state = None if facts is None else self._name(facts, starting=starting, asleep=asleep, now=now)
        if state != self._logged:
            log.debug("the inference engine in this process: %s", "none" if state is None else state or "unknown")
            self._logged = state
        if facts is None or state is None:
            return None
        known = not starting and (facts.requests is not None or allocations is not None)
        idle_seconds = now - self._active_seconds if known else None
        return EngineState(facts.name, facts.version, facts.model, state, idle_seconds)

    def _name(self, facts: EngineFacts, *, starting: bool, asleep: bool, now: float) -> str:
        if starting:
            return "starting"
        if asleep:
            return "asleep"
        if facts.ready is None:
            return ""
        return "idle" if now - (self._active_seconds or now) >= _SERVING_SECONDS else "serving"
