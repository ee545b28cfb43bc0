"""What an event is, and what may be asked of those that are kept."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["EVENT_TYPES", "Event", "Page", "Query"]

EVENT_TYPES = (
    *("oom", "device_lost", "device_returned", "process_started", "process_ended"),
    *("action_asked", "action", "policy_stopped"),
)


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once. None where it is about no one device or process, or that cannot be known."""

    type: str
    """One of `EVENT_TYPES`."""
    time_unix_seconds: float
    """When it happened; events are kept in the order in which the exporter learnt of them."""
    gpu: str | None = None
    uuid: str | None = None
    pid: int | str | None = None
    """The process' name at that time, as `core.naming` has it: the pid that its series carried."""
    workload: str | None = None
    rank: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    """The rest, which differs from type to type; goes into JSON as it is."""
    id: int = 0
    """Given when it is kept. Rises from event to event, also over a restart of the exporter; says nothing else."""
    subject: str = ""
    """What changes its state by this event. One whose subject's last event is of the same type is no news: it was told
    before, to this exporter or to the one before it. Empty: always news."""
    only_after: str = ""
    """News only where the subject's last event is of this type."""


@dataclass(frozen=True, slots=True)
class Query:
    """Which events are wanted, in the order of their ids. With neither `after` nor `since`: the last ones."""

    after: int | None = None
    """Those with a greater id."""
    since_unix_seconds: float | None = None
    """Those that happened then or later."""
    types: tuple[str, ...] = ()
    """Of these types; empty for all."""
    pid: str | None = None
    """Those about the process of this name; an action is about each process that it was meant for."""
    limit: int = 100
    newest_of_each: bool = False
    """Of those that are wanted only the newest about each process on each device."""


@dataclass(frozen=True, slots=True)
class Page:
    """Events, and where to go on."""

    events: tuple[Event, ...]
    next_after: int
    """`Query.after` of the next page, or of what is yet to happen."""
    more: bool
    """There is a next page already."""
