"""The columns of jobs, devices, ledgers and findings, and the lines of events. `info`, `top` and `fleet` share them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, human_ratio, human_seconds, short_bytes
from gpumem_exporter.cli.render.layout import Column, Row, cell, natural
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.core.ledger import CATEGORIES

if TYPE_CHECKING:
    from rich.text import Text

SEVERITIES = {"critical": ("!!", "bold red"), "warning": ("!", "bold yellow")}
"""The mark and the style of each severity that has one."""
_TITLE_WIDTH = 13
# Several events within this time, such as the starts of ranks, happened at once for people.
_WORTH_SAYING_SECONDS = 60.0
_DAY_SECONDS = 86400.0
_OTHER, _IDLE, _FREE = "░", "▒", "·"
# Black also where a terminal's own black is another color.
_INK = "color(16)"
# The length of a part of a strip from which it has the job's name.
_LEAST_NAMED = 5


def clock(unix_seconds: float | None, now_unix_seconds: float | None = None, *, form: str = "%H:%M") -> str:
    """Return a local time such as `03:42`, or the date if it is a day ago: `Mar 04`; a dash if it is unknown."""
    if unix_seconds is None:
        return UNKNOWN
    is_old = now_unix_seconds is not None and now_unix_seconds - unix_seconds > _DAY_SECONDS
    return time.strftime("%b %d" if is_old else form, time.localtime(unix_seconds))


def local_time(unix_seconds: float, now_unix_seconds: float | None) -> str:
    """Return a time of today as `03:42:04`, and of another day with its date."""
    then = time.localtime(unix_seconds)
    today = now_unix_seconds is not None and time.localtime(now_unix_seconds)[:3] == then[:3]
    return time.strftime("%H:%M:%S" if today else "%m-%d %H:%M:%S", then)


def device_ranges(gpus: Iterable[str | None]) -> str:
    """Return the indexes of devices, with ranges: `0-3,6`. A MIG device is no part of a range."""
    runs: list[list[str]] = []
    for gpu in sorted(filter(None, gpus), key=natural):
        if runs and gpu.isdecimal() and runs[-1][-1].isdecimal() and int(gpu) == int(runs[-1][-1]) + 1:
            runs[-1].append(gpu)
        else:
            runs.append([gpu])
    return ",".join(run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def event_line(event: Row, now_unix_seconds: float, width: int) -> Text:
    """Return an event as one line, which is cut to a width, with an ellipsis. The exporter has written its words."""
    at, folded = event["unix_seconds"], event.get("folded")
    first = folded["first_unix_seconds"] if folded else at
    since = f", since {local_time(first, now_unix_seconds)}" if at - first >= _WORTH_SAYING_SECONDS else ""
    title = plain(event["title"])
    title.stylize(SEVERITIES.get(str(event.get("severity")), ("", ""))[1])
    title.pad_right(_TITLE_WIDTH - title.cell_len)
    when = plain(local_time(at, now_unix_seconds), "dim")
    line = plain(" ").join((when, title, plain(f"{event['text']}{since}")))
    line.truncate(width, overflow="ellipsis")
    return line


def draw_strip(device: Row, width: int) -> Text:
    """Return the memory of a device by job, in the order of `strip`: its used memory, idle cache, the rest, and free.

    Each part of `strip` has `name`, `color`, `used_bytes` and `idle_cache_bytes`.
    """
    memory = device["memory"]
    if memory is None:
        return plain(device["error"] or UNKNOWN, "bold red")
    sizes: list[int] = []
    for job in device["strip"]:
        idle = min(job["idle_cache_bytes"] or 0, job["used_bytes"])
        sizes += [job["used_bytes"] - idle, idle]
    rest = memory["total_bytes"] - memory["free_bytes"] - sum(sizes)
    parts = lengths([*sizes, max(0, rest), memory["free_bytes"]], width)
    drawn = plain("")
    for job, used, idle in zip(device["strip"], parts[::2], parts[1::2], strict=False):
        name = cell(plain(job["name"]), used + idle) if used + idle >= _LEAST_NAMED else plain("")
        name.rstrip()
        name.stylize(job["color"], used)
        # A terminal does not dim a background.
        name.stylize(job["color"] if device["dim"] else f"{_INK} on {job['color']}", 0, used)
        blank = name.cell_len
        drawn.append_text(name).append("█" * max(0, used - blank), style=job["color"])
        drawn.append(_IDLE * (idle - max(0, blank - used)), style=job["color"])
    return drawn.append(_OTHER * parts[-2] + _FREE * parts[-1], style="dim")


def lengths(sizes: Sequence[int], width: int) -> list[int]:
    """Return the number of characters of each size; they add up to `width`."""
    total = sum(sizes)
    edges = [round(edge * width / total) for edge in accumulate(sizes, initial=0)] if total else [0] * (len(sizes) + 1)
    return [end - start for start, end in pairwise(edges)]


def at(*path: str) -> Callable[[Row], Any]:
    """Return a function that reads a value in nested documents; None if it is unknown."""

    def value(found: Any) -> Any:
        for name in path:
            found = (found or {}).get(name)
        return found

    return value


def _text(name: str) -> Callable[[Row], str | None]:
    return lambda row: None if row.get(name) in (None, "") else str(row[name])


def _state(row: Row) -> str | None:
    since = row.get("inactive_since_unix_seconds")
    return _text("state")(row) if since is None else f"inactive {human_seconds(row['now'] - since)}"


def _growth(row: Row) -> str:
    growth = row.get("growth_bytes_per_hour")
    return f"+{short_bytes(growth)}/h" if growth else ""


def _kv_cache(row: Row) -> str:
    """The part of an engine's key-value cache that requests use, and its size: `6.1G of 52.0G`."""
    cache = (row.get("engine") or {}).get("kv_cache")
    return f"{short_bytes(cache['used'])} of {short_bytes(cache['size'])}" if cache else ""


def _device_name(device: Row) -> str:
    """The name with the MIG profile, unless the name has the profile already."""
    name, profile = device.get("name") or "", device.get("mig_profile") or ""
    return (name if profile in name else f"{name} {profile}".lstrip()).removeprefix("NVIDIA ") or UNKNOWN


def _size(name: str, rank: int = 0, **more: Any) -> Column:
    return Column(name, at(f"{name}_bytes"), rank, **more)


def _part(name: str, rank: int, heading: str = "") -> Column:
    """Return the column of a size that few rows have: blank for 0 and for an unknown size."""
    value = at(f"{name}_bytes")
    return Column(heading or name, lambda row: value(row) or "", rank, sparse=True)


_STATE_STYLES = {"silent": "red", "orphan": "yellow"} | dict.fromkeys(
    ("not reporting", "unreported", "sleeping"), "dim"
)
_NODE = Column("Node", _text("node"), left=True, space=12, sparse=True)
_GPU = Column("GPU", lambda row: row["gpu"] or row["uuid"], space=4, left=True)
JOBS = (
    _NODE,
    Column(
        *("job", _text("title")),
        space=16,
        left=True,
        style=lambda row: f"bold {row['color']}" if row["color"] else "",
    ),
    Column("owner", lambda row: row["owner"] or (None if "ranks" in row else ""), 2, space=10, left=True),
    Column("devices", lambda row: device_ranges(row["gpus"]), 3, left=True),
    _size("used"),
    _size("allocated", 8, short="Alloc"),
    _size("reserved", 15),
    _size("idle_cache", short="Idle", style=lambda row: "yellow" if row["idle_cache_bytes"] else ""),
    _size("reclaimable", 12, short="Reclaim"),
    _size("fragmented", 11, short="Frag"),
    _size("non_torch", 13),
    _part("nccl", 14, "NCCL"),
    _part("unmapped", 9),
    Column("kv_cache", _kv_cache, 7, space=13, key=at("engine", "kv_cache", "size"), sparse=True),
    Column("growth", _growth, 6, space=8, key=at("growth_bytes_per_hour"), sparse=True, style=lambda _: "yellow"),
    Column("state", _state, 4, space=13, left=True, style=lambda row: _STATE_STYLES.get(row["state"] or "", "")),
    Column(
        "since", lambda row: clock(row["since_unix_seconds"], row["now"]), 5, key=at("since_unix_seconds"), left=True
    ),
    Column("step", lambda row: str(row["step"] or ""), 10, sparse=True),
    Column("engine", lambda row: at("engine", "label")(row) or "", 10, space=20, sparse=True, left=True),
    Column("Command", _text("command"), 16, space=20, left=True),
)
"""Rows are jobs and their processes on each device, of `rows_of`."""
SORTS = {column.name.replace("_", "-").lower(): column.name for column in JOBS}
"""The columns by which jobs can be sorted. Sizes are sorted from the largest, names and times from the smallest."""

DEVICES = (
    _NODE,
    _GPU,
    Column("Device", _device_name, 4, space=16, left=True),
    Column("Memory by job", at("memory", "used_bytes"), space=34, left=True, draw=draw_strip),
    Column("used", at("memory", "used_bytes")),
    Column("free", at("memory", "free_bytes")),
    _size("idle_cache", short="Idle", style=lambda row: "yellow" if row["idle_cache_bytes"] else ""),
    _size("allocatable", 3),
    Column("total", at("memory", "total_bytes"), 1),
    Column("Busy", lambda row: human_ratio(row["utilization_ratio"]), 2, space=5),
)
_SHORT = ("Alloc", "Reclaim", "Frag", "", "Other", "Driver", "Unattr", "")
LEDGER = (
    _NODE,
    _GPU,
    *(Column(name, at("ledger", name), short=short) for name, short in zip(CATEGORIES, _SHORT, strict=True)),
)
"""Rows are devices with a ledger."""
FINDINGS = (
    Column(" ", at("mark"), space=2, left=True, style=at("style")),
    _NODE,
    Column("since", at("since"), space=5, left=True),
    Column("title", at("title"), 1, space=_TITLE_WIDTH, left=True, style=at("style")),
    Column("sentence", at("sentence"), space=60, left=True, wraps=True, style=at("style")),
)
"""Their table has no heading."""
