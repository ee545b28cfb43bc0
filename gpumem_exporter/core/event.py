"""The types of events and of queries for stored events."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ACTION_REQUESTED = "action_asked"
"""The type of a record that a restarted exporter reads, and no event: the event `action` of its end says the same. The
name is from an earlier version, whose files have it."""
EVENT_TYPES = ("oom", "device_lost", "device_returned", "process_started", "process_ended", "action", "policy_stopped")
AUDIT_TYPES = (ACTION_REQUESTED, "action", "policy_stopped")
"""The types of the audit trail: who requested what. It has half of the storage, and all other events the other half."""
PLACE = ("gpu", "uuid", "pid", "workload", "rank")
"""The columns that say where an event happened. They are None if they are unknown or differ between processes."""
MAX_DETAIL_BYTES = 60 << 10
"""The maximum size of `Event.detail` as JSON. With its other columns, an event has at most 64 KiB."""


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened once."""

    type: str
    """One of `EVENT_TYPES`, or `ACTION_REQUESTED`."""
    time_unix_seconds: float
    """When it happened. Events are stored in the order in which the exporter received them."""
    gpu: str | None = None
    uuid: str | None = None
    pid: int | str | None = None
    """The name of the process at that time by `core.naming`, which is the `pid` label of its series."""
    workload: str | None = None
    rank: str | None = None
    detail: Mapping[str, Any] = field(default_factory=dict)
    """The values that depend on the type; must be valid JSON."""
    id: int = 0
    """Assigned when the event is stored. Increases from event to event, also after a restart of the exporter."""
    subject: str = ""
    """The thing whose state the event changes. The event is a duplicate if the subject's last event has the same type,
    also from before a restart. An event with an empty subject is never a duplicate."""
    only_after: str = ""
    """If not empty, the event is stored only if the subject's last event has this type."""
    owner: str = ""
    """The `ProcessKey.share` or `Caller.share` whose part of the storage it takes; empty for events of the node."""
    job: str = ""
    """The id of the process' job in `view.jobs`; empty if the event is not about a single process."""

    @property
    def items(self) -> int:
        """The number of items in the lists of `detail`, such as the results of an action."""
        return sum(len(value) for value in self.detail.values() if isinstance(value, list))


@dataclass(frozen=True, slots=True)
class Query:
    """A query for events, in the order of their ids. Without `after` and `since`, it returns the last events."""

    after: int | None = None
    """Only events with a greater id."""
    since_unix_seconds: float | None = None
    """Only events that happened at or after this time."""
    types: tuple[str, ...] = EVENT_TYPES
    pid: str | None = None
    """Only events about the process of this name. An action is about each of its target processes."""
    job: str | None = None
    """Only events about the job of this id, or about this workload. An action is about each of its target processes."""
    device: str | None = None
    """Only events about the device of this uuid."""
    limit: int = 100
    newest_of_each: bool = False
    """Only the newest event of each process on each device."""
    before: int | None = None
    """Only events with a smaller id."""
    job_id: str | None = None
    """Only ends of processes with this Slurm or Ray job id; unless it is a number, also of the job of this id, and of
    this workload."""
    subject: str | None = None
    """Only events about this subject."""
    last_of_subject: bool = False
    """Only events after which their subject has no other event."""
    uid: int | None = None
    """Only ends of processes of this user."""
    owner: str | None = None
    """Only events of this `Event.owner`."""
    first_owner: str | None = None
    """Not by id: first the events of this owner, then one of each other owner in turn. Continued by `skip`."""
    skip: int = 0
    """The number of events, in the order of `first_owner`, to leave out."""


@dataclass(frozen=True, slots=True)
class Page:
    """The result of a query."""

    events: tuple[Event, ...]
    next_after: int
    """`Query.after` for the next page or for future events."""
    more: bool
    """Whether there is a next page now."""


def oom_subject(session: str, number: int) -> str:
    """Return the subject of the event of an out-of-memory error."""
    return f"oom:{session}:{number}"


def session_of_oom(event: Event) -> str:
    """Return the session of the reporter that reported an out-of-memory error."""
    return event.subject.removeprefix("oom:").rpartition(":")[0]


def process_subject(session: str) -> str:
    """Return the subject of the start and the end of a reporter's session."""
    return f"process:{session}"


def detail_json(detail: Mapping[str, Any]) -> str:
    """Return the detail of an event as JSON of at most `MAX_DETAIL_BYTES`.

    A detail that is longer loses the ends of its lists; `…_left_out` has the number of items that are missing. Raises
    ValueError if it is too long without its lists, or is not valid JSON.
    """
    while len(text := json.dumps(detail, allow_nan=False)) > MAX_DETAIL_BYTES:
        lists = {name: value for name, value in detail.items() if isinstance(value, list) and value}
        if not lists:
            raise ValueError(f"the detail of an event has {len(text)} bytes; at most {MAX_DETAIL_BYTES} are stored")
        name, items = max(lists.items(), key=lambda each: len(each[1]))
        left_out = detail.get(f"{name}_left_out", 0) + len(items) - len(items) // 2
        detail = {**detail, name: items[: len(items) // 2], f"{name}_left_out": left_out}
    return text
