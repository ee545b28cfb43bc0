"""Events as JSON, with the words that people read: the page, `top` and `events` show them. Pure.

Short jobs, and errors that repeat, are one entry: a list of the events that it stands for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Annotated, Any

from pydantic import Field
from typing_extensions import TypedDict

from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.actions.kinds import COMMAND_NAMES
from gpumem_exporter.actions.sentences import subject
from gpumem_exporter.core.caller import caller_text
from gpumem_exporter.core.event import EVENT_TYPES, PLACE, Event
from gpumem_exporter.edge.replies import iso_time

FOLD_SECONDS = 600.0
"""Starts and ends of a job, and its errors on a device, that are further apart are separate entries."""

_FOLDED = {"starts": "process_started", "ends": "process_ended", "errors": "oom"}


class FoldedDocument(TypedDict):
    """Of several starts and ends, or of several errors: how many, and the time of the first."""

    starts: int
    ends: int
    errors: int
    first_unix_seconds: float


class EventDocument(TypedDict):
    """An event. Values that are unknown or that do not apply are null."""

    id: Annotated[int, Field(description="increases from event to event, also after a restart")]
    type: Annotated[str, Field(json_schema_extra={"enum": list(EVENT_TYPES)})]
    time: Annotated[str, Field(description="when it happened, in RFC 3339")]
    unix_seconds: float
    gpu: str | None
    uuid: str | None
    pid: Annotated[int | str | None, Field(description="the `pid` label of the process' series")]
    workload: str | None
    rank: str | None
    job: Annotated[str | None, Field(description="the id of the process' job in `/api/v1/live`")]
    detail: Annotated[dict[str, Any], Field(description="values that depend on the type")]
    title: Annotated[str, Field(description="what happened, in one or two words")]
    text: Annotated[str, Field(description="whose event it is, and its values, in one line")]
    severity: Annotated[str, Field(json_schema_extra={"enum": ["critical", "warning", "info"]})]
    folded: Annotated[
        FoldedDocument | None,
        Field(description="with `fold`: the event stands for several, of which it is the last; otherwise null"),
    ]


def fold(events: Iterable[Event]) -> list[list[Event]]:
    """Return the entries of events, in their order; an entry of several events takes the place of the last one.

    Starts and ends of processes of one job are one entry, as long as each happens within `FOLD_SECONDS` of the one
    before and no new out-of-memory error of the job lies between. So are the errors of one job on one device. A job is
    a user's workload; without one, it is the command for starts and ends, and the process for errors.
    """
    entries: dict[int, list[Event]] = {}
    last: dict[tuple[object, ...], int] = {}
    """The key of the entry that the next start or end of a job joins, or its next error on a device."""
    commands: dict[str, Any] = {}
    """The commands of processes without a workload, by subject: an end may have another spelling of it."""
    for number, event in enumerate(events):
        entry: list[Event] = []
        if event.type in _FOLDED.values():
            is_error, name = event.type == "oom", event.workload or f"pid {event.pid}"
            if not event.workload and not is_error:
                name = commands.setdefault(event.subject or name, event.detail.get("command") or name)
            job = (event.owner, name)
            key = (*job, event.uuid) if is_error else job
            earlier = entries.get(last.get(key, -1))
            if earlier and abs(event.time_unix_seconds - earlier[-1].time_unix_seconds) <= FOLD_SECONDS:
                entry = entries.pop(last[key])
            elif is_error:
                last.pop(job, None)
            last[key] = number
        entry.append(event)
        entries[number] = entry
    return list(entries.values())


def event_document(entry: Sequence[Event]) -> EventDocument:
    """Return an entry: its last event. A column is null where the events differ."""
    differing: dict[str, Any] = {name: None for name in PLACE if len({getattr(each, name) for each in entry}) > 1}
    event = replace(entry[-1], **differing)
    counts = {name: sum(each.type == type_ for each in entry) for name, type_ in _FOLDED.items()}
    starts, ends, errors = counts.values()
    title, severity, text_of = _WORDS.get(event.type, (event.type, "info", lambda _: ""))
    try:
        text = text_of(event) + (f"; {errors} times" if errors > 1 else "")
    except (AttributeError, KeyError, TypeError):  # another version wrote the event with other values
        text = ""
    if event.type == "action":
        title = COMMAND_NAMES.get(event.detail.get("action", ""), event.detail.get("action", title))
    elif starts + ends > 1:
        title = "ran" if starts and ends else title
        text = _process(event) if starts == ends == 1 else _several(event, starts, ends)
    folded = {**counts, "first_unix_seconds": min(each.time_unix_seconds for each in entry)}
    return {
        "id": event.id,
        "type": event.type,
        "time": iso_time(event.time_unix_seconds),
        "unix_seconds": event.time_unix_seconds,
        **{name: getattr(event, name) for name in PLACE},  # type: ignore[typeddict-item]
        "job": event.job or None,
        "detail": dict(event.detail),
        "title": title,
        "text": text,
        "severity": severity,
        "folded": folded if len(entry) > 1 else None,
    }


def _several(event: Event, starts: int, ends: int) -> str:
    name = event.workload or event.detail.get("command") or "processes without a workload"
    processes = f"{name}: {counted(max(starts, ends), 'process', 'processes')}"
    return f"{processes} started, {ends} ended" if 0 < ends < starts else processes


def _device(event: Event) -> str:
    return f"GPU {event.gpu}" if event.gpu else event.uuid or "a device"


def _oom(event: Event) -> str:
    detail: Any = event.detail
    allocator: Any = detail.get("allocator") or {}
    requested, free, limit = (detail.get(name) for name in ("requested_bytes", "device_free_bytes", "limit_bytes"))
    reserved, fragmented = (allocator.get(name) for name in ("reserved_bytes", "fragmented_bytes"))
    room, state = free, "" if free is None else f"; {human_bytes(free)} was free"
    if None not in (requested, free, limit, reserved) and limit - reserved < requested <= free:
        room, state = limit - reserved, f"; {human_bytes(reserved)} of its limit of {human_bytes(limit)} was reserved"
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
    known = detail["freed_bytes"] is not None and detail["action"] == "empty_cache"
    freed = f"freed {human_bytes(detail['freed_bytes'])}" if known else ""
    state = "" if freed and detail["state"] == "done" else detail["state"]
    what = ", ".join(filter(None, (state, freed, f"by {caller_text(detail['requested_by'])}")))
    return f"{subject(detail['results'])}: {what}{f' ({reason})' if (reason := detail.get('reason')) else ''}"


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
    "policy_stopped": ("rule stopped", "warning", lambda event: "{rule}: {reason}".format(**event.detail)),
}
