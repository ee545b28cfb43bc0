"""Events as people read them: a title, one line of text, a severity, and short jobs as one entry. Pure.

The page, `top` and `events` show these words: `GET /api/v1/events` has them beside the values.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.actions.kinds import COMMAND_NAMES
from gpumem_exporter.core.event import PLACE, Event

FOLD_SECONDS = 600.0
"""Starts and ends of a job, and its errors on a device, that are further apart are separate entries."""

_LOCAL_CALLER = re.compile(r"(?:unix|loopback):uid=(\d+)")
_COUNTED = {"process_started": "starts", "process_ended": "ends", "oom": "errors"}


@dataclass(frozen=True, slots=True)
class Entry:
    """An event, or several starts and ends of processes of one job, or several of its errors on one device."""

    event: Event
    """The event, or the last one; its columns are None where the processes differ."""
    starts: int = 0
    ends: int = 0
    errors: int = 0
    first_unix_seconds: float = 0.0
    """When the first of several events happened."""

    @property
    def folded(self) -> bool:
        """Whether the entry stands for several events."""
        return self.starts + self.ends + self.errors > 1

    @property
    def title(self) -> str:
        """One or two words: what happened."""
        if self.folded and self.starts and self.ends:
            return "ran"
        if self.event.type == "action":
            action = str(self.event.detail.get("action"))
            return COMMAND_NAMES.get(action, action)
        return _WORDS[self.event.type][0] if self.event.type in _WORDS else self.event.type

    @property
    def severity(self) -> str:
        """`critical`, `warning` or `info`, as for findings and alerts."""
        return _WORDS[self.event.type][1] if self.event.type in _WORDS else "info"

    @property
    def text(self) -> str:
        """One line: whose event it is, and its values. Empty if another version wrote the event with other values."""
        event = self.event
        if self.starts + self.ends > 1:
            name = event.workload or event.detail.get("command") or "processes without a workload"
            started = f"{name}: {counted(max(self.starts, self.ends), 'process', 'processes')}"
            if self.starts == self.ends == 1:
                return _process(event)
            return f"{started} started, {self.ends} ended" if 0 < self.ends < self.starts else started
        try:
            return _WORDS[event.type][2](event) + (f"; {self.errors} times" if self.errors > 1 else "")
        except (AttributeError, KeyError, TypeError):
            return ""


def fold(events: Iterable[Event]) -> list[Entry]:
    """Return the entries of events, in their order; an entry of several events takes the place of the last one.

    Starts and ends of processes of one job are one entry, as long as each happens within `FOLD_SECONDS` of the one
    before and no new out-of-memory error of the job lies between. So are the errors of one job on one device. A job is
    a user's workload; without one, it is the command for starts and ends, and the process for errors.
    """
    entries: dict[int, Entry] = {}
    last: dict[tuple[object, ...], int] = {}
    """The key of the entry that the next start or end of a job joins, or its next error on a device."""
    commands: dict[str, Any] = {}
    """The commands of processes without a workload, by subject: an end may have another spelling of it."""
    for number, event in enumerate(events):
        if event.type not in _COUNTED:
            entries[number] = Entry(event)
            continue
        is_error, name = event.type == "oom", event.workload or f"pid {event.pid}"
        if not event.workload and not is_error:
            name = commands.setdefault(event.subject or name, event.detail.get("command") or name)
        job = (event.owner, name)
        key = (*job, event.uuid) if is_error else job
        earlier = entries.get(last.get(key, -1))
        if earlier and abs(event.time_unix_seconds - earlier.event.time_unix_seconds) <= FOLD_SECONDS:
            del entries[last[key]]
        else:
            earlier = None
            if is_error:
                last.pop(job, None)
        entries[number] = _joined(earlier, event)
        last[key] = number
    return list(entries.values())


def _joined(earlier: Entry | None, event: Event) -> Entry:
    time, counted_as = event.time_unix_seconds, _COUNTED[event.type]
    if earlier is None:
        return Entry(event, **{counted_as: 1}, first_unix_seconds=time)
    differing: dict[str, Any] = {name: None for name in PLACE if getattr(earlier.event, name) != getattr(event, name)}
    counts = {counted_as: getattr(earlier, counted_as) + 1}
    first_unix_seconds = min(earlier.first_unix_seconds, time)
    return replace(earlier, event=replace(event, **differing), first_unix_seconds=first_unix_seconds, **counts)


def _device(event: Event) -> str:
    return f"GPU {event.gpu}" if event.gpu else event.uuid or "a device"


def _oom(event: Event) -> str:
    detail = event.detail
    allocator = detail.get("allocator") or {}
    requested: Any = detail.get("requested_bytes")
    free: Any = detail.get("device_free_bytes")
    limit: Any = detail.get("limit_bytes")
    reserved: Any = allocator.get("reserved_bytes")
    fragmented: Any = allocator.get("fragmented_bytes")
    room = free
    if None not in (requested, free, limit, reserved) and limit - reserved < requested <= free:
        room = limit - reserved
        state = f"; {human_bytes(reserved)} of its limit of {human_bytes(limit)} was reserved"
    else:
        state = "" if free is None else f"; {human_bytes(free)} was free"
    # See docs/events.md: fragmentation is the cause only if the memory would have been enough.
    if None not in (requested, room, fragmented) and fragmented and room + fragmented >= requested:
        state += f", {human_bytes(fragmented)} fragmented"
    size = "more than was free" if requested is None else human_bytes(requested)
    return f"{_job(event)} requested {size} on {_device(event)}{state}"


def _device_lost(event: Event) -> str:
    error = event.detail.get("error")
    return f"{_device(event)} does not answer{f': {error}' if error else ''}"


def _action(event: Event) -> str:
    detail = event.detail
    results: Sequence[Mapping[str, Any]] = detail["results"]
    pids = {result["pid"] for result in results}
    jobs = {result["workload"] for result in results}
    name = _job(event) if len(pids) == 1 else event.workload if len(jobs) == 1 and event.workload else ""
    count = counted(len(pids), "process", "processes")
    target = name if len(pids) == 1 else f"{name} ({count})" if name else count
    known = detail["freed_bytes"] is not None and detail["action"] == "empty_cache"
    freed = f"freed {human_bytes(detail['freed_bytes'])}" if known else ""
    state = "" if freed and detail["state"] == "done" else detail["state"]
    reason = f" ({detail['reason']})" if detail.get("reason") else ""
    return f"{target}: {', '.join(filter(None, (state, freed)))}, by {caller_text(detail['requested_by'])}{reason}"


def _policy_stopped(event: Event) -> str:
    # An earlier version did not record the end of a stop.
    until = f"; until {event.detail['until'][:16].replace('T', ' ')} UTC" if event.detail.get("until") else ""
    return f"{event.detail['rule']}: {event.detail['reason']}{until}"


def caller_text(requested_by: str) -> str:
    """Return who requested an action, without the socket and the pid of the request: `uid 1001`, `policy:hoard`."""
    local = _LOCAL_CALLER.match(requested_by)
    return f"uid {local[1]}" if local else requested_by


def _job(event: Event) -> str:
    """The name of a process: workload and rank, otherwise its pid."""
    if not event.workload:
        return "a process" if event.pid is None else f"pid {event.pid}"
    return f"{event.workload} rank {event.rank}" if event.rank else event.workload


def _process(event: Event) -> str:
    """The name of a process with its pid."""
    return f"{_job(event)} (pid {event.pid})" if event.workload and event.pid is not None else _job(event)


# The title, the severity and the text of each event type.
_WORDS: dict[str, tuple[str, str, Callable[[Event], str]]] = {
    "oom": ("out of memory", "warning", _oom),
    "device_lost": ("device lost", "critical", _device_lost),
    "device_returned": ("device back", "info", lambda event: f"{_device(event)} answers again"),
    "process_started": ("started", "info", _process),
    "process_ended": ("ended", "info", lambda event: f"{_process(event)}: {event.detail['reason']}"),
    "action": ("action", "info", _action),
    "policy_stopped": ("rule stopped", "warning", _policy_stopped),
}
