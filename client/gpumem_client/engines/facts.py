"""What is known about the inference engine in this process, as values."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gpumem_client.guest_safety import guest_safety, log
from gpumem_client.wire.protocol import MAX_LABEL_LENGTH


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


def unknown(what: str) -> guest_safety:
    """Return a boundary for reading an engine's objects: if another version lacks them, one debug line says so."""
    return guest_safety(functools.partial(_note, what))


def text(value: Any) -> str:
    """Return a text for the wire; empty if the value is not one."""
    return value[:MAX_LABEL_LENGTH] if isinstance(value, str) else ""


_noted: set[str] = set()


def _note(what: str, error: Exception) -> None:
    if what not in _noted:
        _noted.add(what)
        log.debug("%s are unknown: %s: %s", what, type(error).__name__, error)
