"""A profile, or the difference of two, as a JSON document: its head, the largest owners and lines of code, its rows."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from heapq import nlargest
from operator import attrgetter
from typing import Any

from gpumem_client.profile.profile_types import Frame, Owner, ProfiledDevice
from gpumem_exporter.core.container import HERE
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.profile_lines import (
    Group,
    Line,
    bounded,
    by_code,
    by_kind,
    by_owner,
    frame_place,
    frame_text,
    owner_name,
    place,
    stacks_of,
)
from gpumem_exporter.features.profiles.stored_profile import KeptDevice, ProfileFacts, ShownProfile

_ENCODER = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False)
# The maximum number of owners and of lines of code in a document, and of their characters. The rows are complete.
_LARGEST = 100
_MAX_TABLE_LENGTH = 1 << 18
# The rows of a table in a view of a page, as in page.js.
_IN_VIEW = 15


def json_document(shown: ShownProfile, most_bytes: int, *, page: bool = False) -> bytes:
    """Return the document of a profile or of a difference, for whose length the smallest rows are merged.

    A difference has the rows that changed. The document of a page also has the others, what each of its views lists,
    and `all_owners` and `all_lines`, the sums of each view. Its rows share frames: a frame is `[function, place]` in
    the first stack that has it, and its number in later ones.
    """
    differs = shown.before is not None
    head = _head(shown)
    head["kinds"] = [{"kind": each.largest.kind, **_sizes(each, differs=differs)} for each in by_kind(shown.lines)]
    for name, groups in (("owners", by_owner(shown.lines)), ("lines", by_code(shown.lines))):
        changed = [group for group in groups if group.change_bytes]
        head[name] = listed = _table(changed[:_LARGEST], differs=differs)
        rest = changed[len(listed) :]
        head[f"more_{name}"] = {"count": len(rest), "bytes": sum(abs(group.change_bytes) for group in rest)}
        if page:
            sizes = [[size for group in groups if (size := size_of(group)) > 0] for size_of in _views(differs=differs)]
            head[f"all_{name}"] = [{"count": len(each), "bytes": sum(each)} for each in sizes]
            listed += _table(_also_in_views(groups[len(listed) :], differs=differs), differs=differs)
    text = encoded(head)[:-1] + b',"rows":['
    frames: dict[Frame, int] = {}

    def shared(frame: Frame) -> int | list[str]:
        known = len(frames)
        number = frames.setdefault(frame, known)
        return [frame.function, frame_place(frame)] if number == known else number

    def row(line: Line) -> bytes:
        stack = line.stack.frames if line.stack else ()
        shown_stack = list(map(shared, stack)) if page else list(map(frame_text, stack))
        code = {} if page else _code(line)
        at = {"uuid": shown.devices[line.device].uuid, "pool": line.pool}
        # One by one: as objects, they take several times their size.
        return encoded({**_owner(line), **code, **at, **_sizes(line, differs=differs), "stack": shown_stack})

    rows = (line for line in shown.ranked() if line.change_bytes or page)
    return b"".join((text, b",".join(bounded(rows, row, most_bytes - len(text))), b"]}"))


def _views(*, differs: bool) -> Sequence[Callable[[Group], int]]:
    """Return the size of a group in each view of a page: what grew, what shrank, and everything afterwards."""
    after = attrgetter("bytes")
    return (lambda group: group.change_bytes, lambda group: -group.change_bytes, after) if differs else (after,)


def _also_in_views(groups: Sequence[Group], *, differs: bool) -> list[Group]:
    """Return the groups that the tables of a page's views need besides those that changed the most."""
    numbers: dict[int, None] = {}
    for size_of in _views(differs=differs) if differs else ():
        sizes = {number: size for number, group in enumerate(groups) if (size := size_of(group)) > 0}
        numbers.update(dict.fromkeys(nlargest(_IN_VIEW, sizes, key=sizes.__getitem__)))
    return [groups[number] for number in numbers]


def encoded(value: Any) -> bytes:
    """Return a value as compact JSON, in which no text can end a script element of a page, or start a comment in it."""
    return _ENCODER.encode(value).encode("utf-8", "replace").replace(b"<", b"\\u003c")


def _head(shown: ShownProfile) -> dict[str, Any]:
    gpus = shown.gpus
    if shown.before is not None:
        about: dict[str, Any] = {"before": _identity(shown.before), "after": _identity(shown.facts)}
        devices: list[dict[str, Any]] = [{"uuid": device.uuid} for device in shown.devices]
    else:
        facts = shown.facts
        about = {
            **_identity(facts),
            "recorded_seconds": facts.recorded_seconds,
            "pause_seconds": shown.pause_seconds,
            "step": facts.step,
        }
        devices = [asdict(device) for device in shown.devices]
    devices = [{"gpu": gpus.get(device["uuid"]), **device} for device in devices]
    return {**about, "moment": shown.moment, "notes": list(shown.notes), "devices": devices}


def _identity(facts: ProfileFacts) -> dict[str, Any]:
    return {
        "id": facts.id,
        "time": datetime.fromtimestamp(facts.time_unix_seconds, timezone.utc).isoformat(),
        "unix_seconds": facts.time_unix_seconds,
        "cause": facts.cause,
        "pid": facts.pid,
        "workload": facts.workload,
        "rank": facts.rank,
        "job": facts.job,
        "process": [facts.pid_namespace, facts.reported_pid, facts.start_time_ticks],
    }


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


def read_saved(document: Any) -> ShownProfile:
    """Return the profile of a document, to compare it with another one.

    Raises ProfileInvalidError if the document is not the document of one profile.
    """
    try:
        return _saved(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileInvalidError(f"it is not the JSON of a profile: {error!r}") from None


def _saved(document: Mapping[str, Any]) -> ShownProfile:
    devices = document["devices"]
    places = {device["uuid"]: number for number, device in enumerate(devices)}
    texts = {tuple(row["stack"]): None for row in document["rows"]}
    stacks = dict(zip(texts, stacks_of([*map(_frame, each)] for each in texts), strict=True))
    lines = []
    for row in document["rows"]:
        owner = Owner(*(row[name] or "" for name in ("kind", "owner", "shape", "dtype"))) if row["kind"] else None
        stack = stacks[tuple(row["stack"])]
        lines.append(Line(places[row["uuid"]], row["pool"], owner, stack, row["bytes"], row["blocks"]))
    pid_namespace, reported_pid, start_time_ticks = document["process"]
    facts = ProfileFacts(
        id=document["id"],
        time_unix_seconds=document["unix_seconds"],
        cause=document["cause"],
        pid=document["pid"],
        workload=document["workload"],
        rank=document["rank"],
        command="",
        job=document["job"],
        slurm_job_id="",
        ray_job_id="",
        devices=tuple(KeptDevice(each["uuid"], each["gpu"] or "", each["allocated_bytes"], None) for each in devices),
        recorded_seconds=document["recorded_seconds"],
        step=document["step"],
        oom_number=None,
        pid_namespace=pid_namespace,
        reported_pid=reported_pid,
        start_time_ticks=start_time_ticks,
        session="",
        sent_id="",
        owner_uid=None,
        place=HERE,
        size_bytes=0,
    )
    sums = tuple(ProfiledDevice(each["uuid"], each["allocated_bytes"]) for each in devices)
    return ShownProfile(facts, document["moment"], lines, sums)


def _frame(text: str) -> Frame:
    function, _, place = text.removesuffix(")").rpartition(" (")
    file, colon, line = place.rpartition(":")
    return Frame(function, file, int(line)) if colon and line.isdecimal() else Frame(function, place, 0)
