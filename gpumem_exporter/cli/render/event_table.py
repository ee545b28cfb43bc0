"""Events as text: a row for each, with time, type and description."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import counted, human_bytes
from gpumem_exporter.cli.render.terminal import plain, table

if TYPE_CHECKING:
    from rich.table import Table

Event = Mapping[str, Any]

_LONGEST_TYPE = 20
"""The longest shown name of an event type that this version does not know."""


def event_table(
    events: Sequence[Event], now_unix_seconds: float | None, *, most: int | None = None, wrap: bool = False
) -> Table:
    """Return up to `most` of the newest events, with local times. An event of another day has its date.

    `wrap` shows a long description in several lines instead of cutting it.
    """
    newest_first = sorted(events, key=lambda event: (event["unix_seconds"], event["id"]), reverse=True)
    rows = []
    for event in newest_first[:most]:
        name, style, _ = _type(event)
        shown = (plain(_time(event, now_unix_seconds), "dim"), plain(name[:_LONGEST_TYPE], style))
        rows.append((*shown, plain(_description(event))))
    return table("last events", (("", "left"), ("", "left"), ("", "wrap" if wrap else "cut")), rows)


def _time(event: Event, now_unix_seconds: float | None) -> str:
    then = time.localtime(event["unix_seconds"])
    today = now_unix_seconds is not None and time.localtime(now_unix_seconds)[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%m-%d %H:%M:%S", then)


def _description(event: Event) -> str:
    gpu, uuid = event.get("gpu"), event.get("uuid")
    device = f"GPU {gpu}" if gpu else str(uuid or "")
    try:
        text = _type(event)[2](event)
    except (AttributeError, KeyError, TypeError, ValueError):
        text = ""  # an exporter of another version may have other fields
    return ", ".join(filter(None, (device, text)))


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
    freed = f", freed {human_bytes(detail['freed_bytes'])}" if known else ""
    return _action(detail, len({result["pid"] for result in detail["results"]}), f": {detail['state']}{freed}")


def _action(detail: Event, processes: int, outcome: str) -> str:
    reason = f" ({detail['reason']})" if detail.get("reason") else ""
    on = counted(processes, "process", "processes")
    return f"{detail['action']} on {on}{outcome}, by {detail['requested_by']}{reason}"


def _process(event: Event) -> str:
    """The name of a process: workload, rank and pid."""
    workload, rank, pid = event.get("workload"), event.get("rank"), event.get("pid")
    name = f"{workload} rank {rank}" if workload and rank else workload or ""
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
