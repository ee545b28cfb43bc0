"""A profile, or the difference of two, as a JSON document: its head, the largest owners and lines of code, its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from gpumem_client.profile.profile_types import Owner
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_lines import (
    Group,
    Line,
    Moment,
    bounded,
    by_code,
    by_kind,
    by_owner,
    owner_name,
    place,
)
from gpumem_exporter.features.profiles.stored_profile import ProfileFacts, StoredProfile

LARGEST = 100
"""The maximum number of owners and of lines of code in a document. Its rows are complete."""
MAX_LENGTH = 8 << 20
"""The length of a document, which the smallest rows are merged for. A reply of this size keeps the exporter well below
the memory limit of the chart's pod."""
_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
# The characters of one table.
_MAX_TABLE_LENGTH = 1 << 18


def render(profile: StoredProfile | Difference, changed: Iterable[Line], moment: Moment) -> bytes:
    """Return the document of a profile or of a difference; `changed` are its rows, from the largest change on."""
    differs = isinstance(profile, Difference)
    lines = profile.lines if isinstance(profile, Difference) else profile.lines(moment)
    head = document_head(profile, moment)
    tables = largest(by_owner(lines), by_code(lines), lambda each: abs(each.change_bytes), LARGEST, differs=differs)
    text = encoded({**head, "kinds": kinds(lines, differs=differs), **tables})[:-1] + b',"rows":['

    def row(line: Line) -> bytes:
        stack = [*line.stack.texts()][::-1] if line.stack else []
        at = {"uuid": head["devices"][line.device]["uuid"], "pool": line.pool}
        # One by one: as objects, they take several times their size.
        return encoded({**_owner(line), **_code(line), **at, **_sizes(line, differs=differs), "stack": stack})

    return b"".join((text, b",".join(bounded(changed, row, MAX_LENGTH - len(text))), b"]}"))


def encoded(value: Any) -> bytes:
    """Return a value as compact JSON."""
    return _ENCODER.encode(value).encode("utf-8", "replace")


def document_head(profile: StoredProfile | Difference, moment: Moment) -> dict[str, Any]:
    """Return what a document has besides tables and rows."""
    gpus = profile.gpus
    if isinstance(profile, Difference):
        return {
            "before": _identity(profile.before),
            "after": _identity(profile.after),
            "moment": profile.moment,
            "notes": list(profile.notes),
            "devices": [{"gpu": gpus.get(uuid), "uuid": uuid} for uuid in profile.uuids],
        }
    return {
        **_identity(profile),
        "recorded_seconds": profile.recorded_seconds,
        "pause_seconds": profile.profile.pause_seconds,
        "step": profile.step,
        "moment": moment,
        "notes": list(profile.notes),
        "devices": [{"gpu": gpus.get(device.uuid), **asdict(device)} for device in profile.profile.devices],
    }


def _identity(stored: ProfileFacts) -> dict[str, Any]:
    return {
        "id": stored.id,
        "time": datetime.fromtimestamp(stored.time_unix_seconds, timezone.utc).isoformat(),
        "unix_seconds": stored.time_unix_seconds,
        "cause": stored.cause,
        "pid": stored.pid,
        "workload": stored.workload,
        "rank": stored.rank,
        "job": stored.job,
        "process": [stored.pid_namespace, stored.reported_pid, stored.start_time_ticks],
    }


def kinds(lines: Iterable[Line], *, differs: bool) -> list[dict[str, Any]]:
    """Return the kinds of owners."""
    return [{"kind": group.largest.kind, **_sizes(group, differs=differs)} for group in by_kind(lines)]


def largest(
    owners: Iterable[Group], code: Iterable[Group], size: Callable[[Group], int], most: int, *, differs: bool
) -> dict[str, Any]:
    """Return at most `most` owners and lines of code, the largest first, and the number and the size of the others.

    `size` is what makes a group large; a group whose size is not above 0 is left out.
    """
    tables: dict[str, Any] = {}
    for name, groups in (("owners", owners), ("lines", code)):
        sized = sorted((group for group in groups if size(group) > 0), key=size, reverse=True)
        tables[name] = shown = _table(sized[:most], differs=differs)
        rest = sized[len(shown) :]
        tables[f"more_{name}"] = {"count": len(rest), "bytes": sum(map(size, rest))}
    return tables


def _table(groups: Iterable[Group], *, differs: bool) -> list[dict[str, Any]]:
    table: list[dict[str, Any]] = []
    length = 0
    for group in groups:
        owner = group.largest.owner
        listed = {"owner": owner_name(owner) or None if owner else None}
        row = {**_owner(group.largest), **listed, **_code(group.code), **_sizes(group, differs=differs)}
        length += sum(len(value) for value in row.values() if isinstance(value, str))
        if length > _MAX_TABLE_LENGTH:
            break
        table.append(row)
    return table


def _sizes(of: Line | Group, *, differs: bool) -> dict[str, int]:
    if not differs:
        return {"bytes": of.bytes, "blocks": of.blocks}
    return {"before_bytes": of.before_bytes, "after_bytes": of.bytes, "change_bytes": of.change_bytes}


def _owner(line: Line) -> dict[str, Any]:
    owner = line.owner or Owner("")
    return {
        "kind": owner.kind or None,
        "owner": owner.name or None,
        "shape": owner.shape or None,
        "dtype": owner.dtype or None,
    }


def _code(line: Line) -> dict[str, Any]:
    stack = line.stack
    if stack is None:
        return {"line": None, "file": None, "called_from": None}
    return {"line": place(stack.user), "file": stack.user.file, "called_from": place(stack.caller)}
