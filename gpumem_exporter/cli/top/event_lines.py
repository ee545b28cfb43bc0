"""The events of `top`, the newest first: below the processes, instead of them, or printed. Pure."""

from __future__ import annotations

import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.cells import cell, line, width_of
from gpumem_exporter.cli.top.source import Reading
from gpumem_exporter.cli.top.view import View

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["event_lines", "events_alone", "events_below", "last_events", "newest_first"]

Event = Mapping[str, Any]

_HEADING = "last events"
_LONG_PAGE = 20
"""The number of lines from which the events always get a quarter."""
_NAME_WIDTH = len("out of memory")
_LONGEST_NAME = 20
"""The longest shown name of an event type that this version does not know."""


def events_below(reading: Reading, width: int, page: int, processes: int) -> list[Text]:
    """Return a heading and the last events for the space below the processes; empty if there is no space.

    `page` is the number of lines for processes and events. On a short page, events use only the lines that the
    `processes` leave free.
    """
    room = max(page - processes - 1, page // 4 if page >= _LONG_PAGE else 0)
    return last_events(reading, width, room - 1)


def events_alone(reading: Reading, view: View, width: int, page: int) -> tuple[list[Text], View, str]:
    """Return a heading and `page` lines of all events, from the view's position.

    Returns:
        The lines, the view with a valid position, and the range of shown lines, such as `1-5 of 20`.
    """
    lines = event_lines(newest_first(reading.events or ()), width, reading.taken_unix_seconds, wrap=True)
    first = max(0, min(view.first_line, len(lines) - page))
    view, shown = replace(view, first_line=first), lines[first : first + page]
    if not lines:
        reason = [plain(part, "dim") for part in textwrap.wrap(_reason_for_none(reading), width)]
        return [plain(_HEADING, "bold"), *reason], view, ""
    return [plain(_HEADING, "bold"), *shown], view, f"{first + 1}-{first + len(shown)} of {len(lines)}"


def last_events(reading: Reading, width: int, max_events: int) -> list[Text]:
    """Return a heading and the last events, a line each; empty if no event is known."""
    events = newest_first(reading.events or ())[: max(0, max_events)]
    return [plain(_HEADING, "bold"), *event_lines(events, width, reading.taken_unix_seconds)] if events else []


def newest_first(events: Sequence[Event]) -> list[Event]:
    """Return the events, the newest first."""
    return sorted(events, key=lambda event: (event["unix_seconds"], event["id"]), reverse=True)


def event_lines(
    events: Sequence[Event], width: int, now_unix_seconds: float | None, *, wrap: bool = False
) -> list[Text]:
    """Return the lines of events: local time, type and description. An event of another day has its date.

    `now_unix_seconds` is by the clock of the events. An event that is too long is cut, or has several lines if `wrap`
    is set.
    """
    from rich.console import Console

    times = [_time(event, now_unix_seconds) for event in events]
    names = [_type(event)[:2] for event in events]
    time_width, name_width = width_of(times), min(width_of((name for name, _ in names), _NAME_WIDTH), _LONGEST_NAME)
    console = Console(width=width)
    room = max(1, width - time_width - name_width - 2)
    drawn = []
    for event, shown_time, (name, style) in zip(events, times, names, strict=True):
        text = plain(_description(event))
        first, *rest = (wrap and list(text.wrap(console, room))) or [cell(text, room)]
        start = [cell(shown_time, time_width, style="dim"), cell(name, name_width, style=style)]
        drawn += [
            line([*start, first], width),
            *(cell(plain(" " * (width - room)).append(part), width) for part in rest),
        ]
    return drawn


def _description(event: Event) -> str:
    gpu, uuid = event.get("gpu"), event.get("uuid")
    device = f"GPU {gpu}" if gpu else str(uuid or "")
    try:
        _, _, describe = _type(event)
        text = describe(event)
    except (AttributeError, KeyError, TypeError, ValueError):
        text = ""  # An exporter of another version may have other fields.
    return f"{device}, {text}" if device and text else device or text


def _oom(event: Event) -> str:
    detail = event["detail"]
    requested, free, limit = (detail.get(f"{name}_bytes") for name in ("requested", "device_free", "limit"))
    allocator = detail.get("allocator") or {}
    reserved, fragmented = allocator.get("reserved_bytes"), allocator.get("fragmented_bytes")
    state = [] if free is None else [f"{human_bytes(free)} was free"]
    if None not in (requested, free, limit, reserved) and free >= requested:
        state.append(f"{human_bytes(reserved)} of its limit of {human_bytes(limit)} reserved")
    if fragmented:
        state.append(f"{human_bytes(fragmented)} fragmented")
    size = "more than was free" if requested is None else human_bytes(requested)
    return "; ".join(filter(None, (f"{_process(event)} requested {size}", ", ".join(state))))


def _device_lost(event: Event) -> str:
    error = event["detail"].get("error")
    return f"does not answer: {error}" if error else "does not answer"


def _action_requested(event: Event) -> str:
    detail = event["detail"]
    return _action(detail, len(detail["processes"]) + detail.get("processes_left_out", 0), "")


def _action_ended(event: Event) -> str:
    detail = event["detail"]
    known = detail["freed_bytes"] is not None and detail["action"] != "reset_peak"
    freed_text = f", freed {human_bytes(detail['freed_bytes'])}" if known else ""
    return _action(detail, len({result["pid"] for result in detail["results"]}), f": {detail['state']}{freed_text}")


def _action(detail: Event, processes: int, outcome: str) -> str:
    count = counted(processes, "process", "processes")
    reason = f" ({detail['reason']})" if detail.get("reason") else ""
    return f"{detail['action']} on {count}{outcome}, by {detail['requested_by']}{reason}"


def _process(event: Event) -> str:
    """The name of a process: workload, rank and pid."""
    workload, rank, pid = event.get("workload"), event.get("rank"), event.get("pid")
    name = (f"{workload} rank {rank}" if rank else str(workload)) if workload else ""
    if pid is None:
        return name or "a process"
    return f"{name} (pid {pid})" if name else f"pid {pid}"


_TYPES: dict[str, tuple[str, str, Callable[[Event], str]]] = {
    "oom": ("out of memory", "bold red", _oom),
    "device_lost": ("device lost", "bold red", _device_lost),
    "device_returned": ("device back", "bold green", lambda _: "answers again"),
    "process_started": ("started", "", _process),
    "process_ended": ("ended", "", lambda event: f"{_process(event)}: {event['detail']['reason']}"),
    "action_asked": ("requested", "", _action_requested),
    "action": ("action", "", _action_ended),
    "policy_stopped": (
        "rule stopped",
        "bold yellow",
        lambda event: f"{event['detail']['rule']}: {event['detail']['reason']}",
    ),
}
"""The shown name, its style, and the description of each event type."""


def _type(event: Event) -> tuple[str, str, Callable[[Event], str]]:
    kind = str(event.get("type"))
    return _TYPES.get(kind, (kind, "", lambda _: ""))


def _time(event: Event, now_unix_seconds: float | None) -> str:
    then = time.localtime(event["unix_seconds"])
    today = now_unix_seconds is not None and time.localtime(now_unix_seconds)[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%m-%d %H:%M:%S", then)


def _reason_for_none(reading: Reading) -> str:
    if not reading.url:
        return "Events need an exporter, and no exporter answers."
    if reading.events is not None:
        return "No event matches." if reading.target.given() else "The exporter has recorded no event yet."
    reason = reading.no_events or "waiting for the events"
    return f"{reason[0].upper()}{reason[1:]}{'' if reason.endswith('.') else '.'}"
