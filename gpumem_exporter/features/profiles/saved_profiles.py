"""Profiles that were saved as JSON documents, read again to compare them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpumem_client.profile.profile_types import Frame, Owner
from gpumem_exporter.core.container import HERE
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.features.profiles.profile_lines import Line, Stack, Stacks
from gpumem_exporter.features.profiles.stored_profile import KeptDevice, ProfileAtMoment

_FRAME = re.compile(r"(?s)(.*) \((.*?)(?::(\d+))?\)")


def read_saved(document: Any) -> ProfileAtMoment:
    """Return the profile of a JSON document that `profile_json.render` wrote.

    Raises ProfileInvalidError if the document is not the document of one profile.
    """
    try:
        return _saved(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileInvalidError(f"it is not the JSON of a profile: {error!r}") from None


def _saved(document: Mapping[str, Any]) -> ProfileAtMoment:
    devices = tuple(KeptDevice(e["uuid"], e["gpu"] or "", e["allocated_bytes"], None) for e in document["devices"])
    places = {device.uuid: number for number, device in enumerate(devices)}
    lines = []
    stacks, known = Stacks(), dict[tuple[str, ...], Stack | None]()
    for row in document["rows"]:
        owner = Owner(*(row[name] or "" for name in ("kind", "owner", "shape", "dtype")))
        frames = tuple(row["stack"])
        if frames not in known:
            known[frames] = stacks.of(tuple(map(_frame, frames)))
        place = places[row["uuid"]]
        of = owner if owner.kind else None
        lines.append(Line(place, row["pool"], of, known[frames], row["bytes"], row["blocks"]))
    names = ("pid", "workload", "rank", "command", "job", "slurm_job_id", "ray_job_id", "recorded_seconds", "step")
    process = ("pid_namespace", "reported_pid", "start_time_ticks")
    return ProfileAtMoment(
        id=document["id"],
        time_unix_seconds=document["unix_seconds"],
        cause=document["cause"],
        devices=devices,
        oom_number=None,
        session="",
        sent_id="",
        owner_uid=None,
        place=HERE,
        size_bytes=0,
        moment=document["moment"],
        lines=tuple(lines),
        **{name: document.get(name, "") for name in names},
        **dict(zip(process, document["process"], strict=True)),
    )


def _frame(text: str) -> Frame:
    found = _FRAME.fullmatch(text)
    return Frame(found[1], found[2], int(found[3] or 0)) if found else Frame(text, "", 0)
