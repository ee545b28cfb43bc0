"""What is known about the inference engine in this process, and its state over time, such as starting and asleep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from gpumem_client.guest_safety import ErrorLog, guest_safety, log
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH, EngineState

_Result = TypeVar("_Result")
# An engine serves until it has had no request for this time.
_SERVING_SECONDS = 10.0
_errors = ErrorLog()


@dataclass(frozen=True)
class CacheUse:
    """The shares of an engine's key-value cache, from 0 to 1. None if a share is not known."""

    used: float
    """What requests use now."""
    evictable: float | None = None
    """What is kept for later requests with the same prefix, and can be used at once."""


@dataclass(frozen=True)
class EngineFacts:
    """The engine at one time. The defaults mean unknown."""

    name: str
    """Such as `vllm` and `sglang`."""
    version: str = ""
    model: str = ""
    measures: bool | None = None
    """Whether it starts and measures free memory: memory released on its devices spoils its start."""
    ready: bool | None = None
    """Whether its start is over."""
    requests: int | None = None
    """Requests that run or wait."""
    held: Mapping[int, Mapping[str, int]] = field(default_factory=dict)
    """Bytes of its tensors by device index and component."""
    cache: CacheUse | None = None


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


def known(what: str, function: Callable[[], _Result], otherwise: _Result) -> _Result:
    """Return what a reading of an engine's objects returns. If another version lacks them, one debug line says so."""
    with guest_safety(lambda error: _errors.note(f"{what} are unknown: {type(error).__name__}", error, logging.DEBUG)):
        return function()
    return otherwise


def text(value: Any) -> str:
    """Return a text for the wire; empty if the value is not one."""
    return value[:MAX_LABEL_LENGTH] if isinstance(value, str) else ""
