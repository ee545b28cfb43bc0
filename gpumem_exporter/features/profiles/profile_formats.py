"""A profile, or the difference of two, as a file: JSON, folded stacks, pprof, or a page."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import partial
from typing import Any

from gpumem_client.profile.model import Owner
from gpumem_exporter.features.profiles import pprof, profile_page
from gpumem_exporter.features.profiles.profile_diff import Difference
from gpumem_exporter.features.profiles.profile_lines import (
    Group,
    Line,
    Moment,
    OwnerPaths,
    by_code,
    by_kind,
    by_owner,
    caller,
    forget_names,
    frames,
    joined,
    owner_name,
    place,
    stack_names,
    user_frame,
)
from gpumem_exporter.features.profiles.stored_profile import Format, ProfileFacts, StoredProfile, device_names

SUFFIXES: Mapping[Format, str] = {"html": "html", "pprof": "pb.gz", "folded": "folded", "json": "json"}
"""The end of the name of a file in each format."""

LARGEST = 100
"""How many owners and lines of code a JSON document has. Its rows are complete."""
# The length of all rows. Each is written in full, so a compressed profile of 1 MiB could become gigabytes. A reply of
# this size keeps the exporter well below the memory limit of the chart's pod.
_MAX_LENGTH = 8 << 20
# The length of a row without its names, as text and in pprof, where each frame is a number.
_ROW_LENGTH, _SAMPLE_LENGTH, _LOCATION_LENGTH = 200, 40, 3
_SEPARATORS = re.compile(r"[;\x00-\x1f\x7f\u2028\u2029]+")


def render(profile: StoredProfile | Difference, form: Format, moment: Moment = "live") -> tuple[bytes, str]:
    """Return a profile or a difference as a file, and its media type.

    `moment` is for a profile; a difference has its own, and a page has both. May take a second: call it in a thread.
    Raises NoPeakError for the highest moment of a profile that was taken without a recording.
    """
    try:
        return _rendered(profile, form, moment)
    finally:
        forget_names()


def _rendered(profile: StoredProfile | Difference, form: Format, moment: Moment) -> tuple[bytes, str]:
    if form == "html":
        return profile_page.render(profile), "text/html; charset=utf-8"
    differs = isinstance(profile, Difference)
    lines = profile.lines if isinstance(profile, Difference) else profile.lines(moment)
    changed = sorted((line for line in lines if line.change_bytes), key=lambda line: -abs(line.change_bytes))
    if form == "pprof":
        return _pprof(profile, changed), "application/octet-stream"
    if form == "folded":
        return _folded(profile, changed), "text/plain; charset=utf-8"
    head = _difference_head(profile) if isinstance(profile, Difference) else _profile_head(profile, moment)
    document = json.dumps({**head, **_tables(lines, differs=differs)}, separators=(",", ":"))
    # The rows one by one: as objects, they take several times their size.
    text = bytearray(document[:-1].encode() + b',"rows":[')
    for row in _rows(changed, [each["uuid"] for each in head["devices"]], differs=differs):
        text += json.dumps(row, separators=(",", ":")).encode() + b","
    if text.endswith(b","):
        del text[-1:]
    text += b"]}"
    return bytes(text), "application/json"


def _profile_head(stored: StoredProfile, moment: Moment) -> dict[str, Any]:
    profile, gpus = stored.profile, stored.gpus
    return {
        **_identity(stored),
        "recorded_seconds": profile.recorded_seconds,
        "pause_seconds": profile.pause_seconds,
        "step": profile.step,
        "moment": moment,
        "notes": list(profile.notes),
        "devices": [{"gpu": gpus.get(device.uuid), **asdict(device)} for device in profile.devices],
    }


def _difference_head(change: Difference) -> dict[str, Any]:
    gpus = change.gpus
    return {
        "before": _identity(change.before),
        "after": _identity(change.after),
        "moment": change.moment,
        "notes": list(change.notes),
        "devices": [{"gpu": gpus.get(uuid), "uuid": uuid} for uuid in change.uuids],
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


def _sizes(of: Line | Group, *, differs: bool) -> Mapping[str, int]:
    if not differs:
        return {"bytes": of.bytes, "blocks": of.blocks}
    return {"before_bytes": of.before_bytes, "after_bytes": of.bytes, "change_bytes": of.change_bytes}


def _tables(lines: Sequence[Line], *, differs: bool) -> dict[str, Any]:
    """Return the kinds of owners, the largest owners and the largest lines of code."""
    sizes = partial(_sizes, differs=differs)

    def largest(groups: Iterable[Group]) -> list[dict[str, Any]]:
        changed_groups = [group for group in groups if group.change_bytes][:LARGEST]
        return [
            {**_owner(group.largest), "owner": _listed_owner(group.largest), **_code(group.code), **sizes(group)}
            for group in changed_groups
        ]

    return {
        "kinds": [
            {"kind": group.largest.owner.kind if group.largest.owner else "unseen", **sizes(group)}
            for group in by_kind(lines)
        ],
        "owners": largest(by_owner(lines)),
        "lines": largest(by_code(lines)),
    }


def _rows(changed: Iterable[Line], uuids: Sequence[str], *, differs: bool) -> Iterator[dict[str, Any]]:
    """Yield all rows, from the largest change to the smallest."""
    for line in _bounded(changed, _text_length):
        yield {
            **_owner(line),
            **_code(line),
            "uuid": uuids[line.device],
            "pool": line.pool,
            **_sizes(line, differs=differs),
            "stack": [*frames(line)][::-1],
        }


def _listed_owner(line: Line) -> str | None:
    return owner_name(line.owner) or None if line.owner else None


def _owner(line: Line) -> dict[str, Any]:
    owner = line.owner or Owner("")
    return {
        "kind": owner.kind or None,
        "owner": owner.name or None,
        "shape": owner.shape or None,
        "dtype": owner.dtype or None,
    }


def _code(line: Line) -> dict[str, Any]:
    frame, called_from = user_frame(line.stack), caller(line.stack)
    return {
        "line": place(frame) or None,
        "file": frame.file if frame else None,
        "called_from": place(called_from) or None,
    }


def _text_length(line: Line) -> int:
    return _ROW_LENGTH + sum(map(len, line.owner or ())) + sum(len(f.function) + len(f.file) for f in line.stack)


def _sample_length(line: Line) -> int:
    return _SAMPLE_LENGTH + _LOCATION_LENGTH * len(line.stack)


def _bounded(lines: Iterable[Line], length_of: Callable[[Line], int]) -> Iterator[Line]:
    """Yield lines, from the largest to the smallest, until they are too long; then the sums of the others."""
    length = 0
    others: list[Line] = []
    for line in lines:
        length += length_of(line) if length <= _MAX_LENGTH else 0
        if length <= _MAX_LENGTH:
            yield line
        else:
            others.append(line)
    for merged in joined(others, lambda line: line[:2]):
        yield merged._replace(owner=Owner("merged"), stack=())


def _folded(profile: StoredProfile | Difference, changed: Sequence[Line]) -> bytes:
    """Return a line for each stack, the outermost frame first: `GPU 0;main (train.py:12);… BYTES`."""
    devices = device_names(profile.uuids, profile.gpus)
    paths = OwnerPaths()
    sums: dict[str, int] = {}
    for line in _bounded(changed, _text_length):
        frames = (devices[line.device], *stack_names(line, paths))
        stack = ";".join(_SEPARATORS.sub(" ", frame) for frame in frames)
        sums[stack] = sums.get(stack, 0) + line.change_bytes
    return "".join(f"{stack} {size}\n" for stack, size in sums.items()).encode("utf-8", "replace")


def _pprof(profile: StoredProfile | Difference, changed: Sequence[Line]) -> bytes:
    stored = profile.after if isinstance(profile, Difference) else profile
    return pprof.encode(
        _bounded(changed, _sample_length),
        device_names(profile.uuids, profile.gpus),
        time_unix_seconds=stored.time_unix_seconds,
        duration_seconds=stored.recorded_seconds,
        comments=profile.notes,
    )
