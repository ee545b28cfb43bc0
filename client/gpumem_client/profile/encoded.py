"""Encodes a profile for the exporter: JSON as gzip, within the limits of `profile_types`."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from gpumem_client.profile.heap_blocks import resting
from gpumem_client.profile.profile_types import (
    FORMAT,
    MAX_COMPRESSED_BYTES,
    MAX_DOCUMENT_BYTES,
    MAX_LISTS,
    MAX_ROWS,
    MAX_VALUES,
    Owner,
    Profile,
    Row,
)
from gpumem_client.wire.protocol import ProcessIdentity, to_wire

_GZIP = 31
_LEAST_SHRINKING = 0.8


def encode(profile: Profile, process: ProcessIdentity) -> bytes:
    """Return the document as gzip. If it is too long, the smallest rows are merged until it fits."""
    kept = min(len(profile.rows), MAX_ROWS)
    while True:
        text = _text(_with_rows(profile, kept), process)
        compressor = zlib.compressobj(6, zlib.DEFLATED, _GZIP)
        body = compressor.compress(text) + compressor.flush()
        excess = max(
            len(body) / MAX_COMPRESSED_BYTES,
            len(text) / MAX_DOCUMENT_BYTES,
            (text.count(b"[") + text.count(b"{")) / MAX_LISTS,
            text.count(b",") / MAX_VALUES,
        )
        if excess <= 1 or kept == 0:
            return body
        kept = int(kept * min(_LEAST_SHRINKING, 0.9 / excess))


def _with_rows(profile: Profile, kept: int) -> Profile:
    """Return the profile with its `kept` largest rows, and with the stacks, frames and owners that they have.

    The other rows are one row of the kind `merged` on each device.
    """
    rows = list(profile.rows)
    if kept < len(rows):
        rows.sort(key=lambda row: max(row.live_bytes, row.peak_bytes or 0), reverse=True)
    merged: dict[int, Row] = {}
    for row in resting(rows[kept:]):
        before = merged.get(row.device, Row(row.device, row.pool, None, len(profile.owners), 0, 0, None, None))
        merged[row.device] = before._replace(
            pool=row.pool if row.pool == before.pool else "default",
            live_bytes=before.live_bytes + row.live_bytes,
            live_blocks=before.live_blocks + row.live_blocks,
            peak_bytes=None if row.peak_bytes is None else (before.peak_bytes or 0) + row.peak_bytes,
            peak_blocks=None if row.peak_blocks is None else (before.peak_blocks or 0) + row.peak_blocks,
        )
    rows = [*rows[:kept], *merged.values()]
    every_owner = (*profile.owners, Owner("merged"))
    stacks, owners = _used(row.stack for row in rows), _used(row.owner for row in rows)
    frames = _used(number for stack in stacks for number in profile.stacks[stack])
    return replace(
        profile,
        rows=tuple(
            row._replace(
                stack=None if row.stack is None else stacks[row.stack],
                owner=None if row.owner is None else owners[row.owner],
            )
            for row in resting(rows)
        ),
        stacks=tuple(tuple(frames[number] for number in profile.stacks[stack]) for stack in resting(stacks)),
        frames=tuple(profile.frames[frame] for frame in frames),
        owners=tuple(every_owner[owner] for owner in owners),
    )


def _used(numbers: Iterable[int | None]) -> dict[int, int]:
    """Return the new number of each number, in the order in which they appear."""
    used: dict[int, int] = {}
    for number in resting(numbers):
        if number is not None:
            used.setdefault(number, len(used))
    return used


def _text(profile: Profile, process: ProcessIdentity) -> bytes:
    """Return the document as JSON."""
    devices = [vars(device) for device in profile.devices]
    document: dict[str, Any] = {"format": FORMAT, "process": to_wire(process), **vars(profile), "devices": devices}
    # Item by item: encoding the document at once would keep the GIL for its whole length.
    encode_item = json.JSONEncoder(separators=(",", ":"), ensure_ascii=False).encode
    members = []
    for name, value in document.items():
        parts = isinstance(value, (list, tuple))
        text = "[" + ",".join(encode_item(item) for item in resting(value)) + "]" if parts else encode_item(value)
        members.append(f'"{name}":{text}')
    # File names that are not UTF-8 are surrogates here. JSON may not have them.
    return f"{{{','.join(members)}}}".encode("utf-8", "replace")
