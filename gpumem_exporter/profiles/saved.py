"""Profiles that were saved as JSON documents, read again to compare them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from gpumem_client.profile.model import Frame, Owner, Profile, ProfiledDevice, Row
from gpumem_exporter.core.place import HERE
from gpumem_exporter.errors import ProfileInvalidError
from gpumem_exporter.profiles.model import KeptDevice, StoredProfile

_FRAME = re.compile(r"(?s)(.*) \((.*?)(?::(\d+))?\)")


def read_saved(document: Any) -> StoredProfile:
    """Return the profile of a JSON document that `formats.render` wrote. Its moment becomes the end.

    Raises ProfileInvalidError if the document is not the document of one profile.
    """
    try:
        return _stored(document)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ProfileInvalidError(f"it is not the JSON of a profile: {error!r}") from None


def _stored(document: Mapping[str, Any]) -> StoredProfile:
    devices = tuple(
        ProfiledDevice(each["uuid"], each["allocated_bytes"], peak_bytes=None) for each in document["devices"]
    )
    places = {device.uuid: number for number, device in enumerate(devices)}
    frames: dict[Frame, int] = {}
    stacks: dict[tuple[int, ...], int] = {}
    owners: dict[Owner, int] = {}
    rows = []
    for row in document["rows"]:
        stack = tuple(frames.setdefault(_frame(text), len(frames)) for text in row["stack"])
        owner = Owner(*(row[name] or "" for name in ("kind", "owner", "shape", "dtype")))
        rows.append(
            Row(
                places[row["uuid"]],
                row["pool"],
                stacks.setdefault(stack, len(stacks)) if stack else None,
                owners.setdefault(owner, len(owners)) if owner.kind else None,
                row["bytes"],
                row["blocks"],
                None,
                None,
            )
        )
    profile = Profile(
        document["id"],
        document["cause"],
        devices,
        tuple(rows),
        tuple(stacks),
        tuple(frames),
        tuple(owners),
        recorded_seconds=document["recorded_seconds"],
    )
    names = ("pid", "workload", "rank", "command", "job", "slurm_job_id", "ray_job_id", "recorded_seconds", "step")
    process = ("pid_namespace", "reported_pid", "start_time_ticks")
    return StoredProfile(
        id=document["id"],
        time_unix_seconds=document["unix_seconds"],
        cause=document["cause"],
        devices=tuple(KeptDevice(e["uuid"], e["gpu"] or "", e["allocated_bytes"], None) for e in document["devices"]),
        oom_number=None,
        session="",
        sent_id="",
        owner_uid=None,
        place=HERE,
        size_bytes=0,
        profile=profile,
        **{name: document.get(name, "") for name in names},
        **dict(zip(process, document["process"], strict=True)),
    )


def _frame(text: str) -> Frame:
    found = _FRAME.fullmatch(text)
    return Frame(found[1], found[2], int(found[3] or 0)) if found else Frame(text, "", 0)
