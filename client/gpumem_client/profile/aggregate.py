"""The rows of a profile: adds up allocations by device, pool, stack and owner, and encodes the result for the exporter.

The document is JSON as gzip, within the limits of `profile_types`.
"""

from __future__ import annotations

import json
import time
import zlib
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Tuple

from gpumem_client.profile.heap_blocks import Lifetime, Stacks, resting
from gpumem_client.profile.profile_types import (
    FORMAT,
    MAX_COMPRESSED_BYTES,
    MAX_DOCUMENT_BYTES,
    MAX_LISTS,
    MAX_ROWS,
    MAX_VALUES,
    Owner,
    Profile,
    ProfiledDevice,
    Row,
)
from gpumem_client.wire.protocol import ProcessIdentity, to_wire

Place = Tuple[int, int]
"""The index of a device, and the address at which a storage starts."""

_LATEST_OWNERS = 10


class Naming(NamedTuple):
    """One search for the owners of storages, and when it read their addresses, in microseconds since the epoch."""

    started_us: int
    ended_us: int
    owners: Mapping[Place, Owner]
    """By place, which may lie within a block."""
    graph: str = ""
    """What keeps an autograd graph, and with it blocks that no Python object refers to; empty if it is not known."""
    notes: tuple[str, ...] = ()
    """What could not be seen and why, for people."""


class LatestOwners(NamedTuple):
    """What held the most memory at the end of a profile."""

    taken_seconds: float
    """On the monotonic clock."""
    owners: list[tuple[str, int]]
    """Names and bytes, the largest first."""


_latest: list[LatestOwners] = []


def latest_owners() -> LatestOwners | None:
    """Return the owners of the last profile of this process; None without one. Any thread may call this."""
    return next(iter(_latest), None)


class Rows:
    """The rows of a profile, while allocations are added to them."""

    def __init__(self, stacks: Stacks, namings: Sequence[Naming]) -> None:
        self._stacks = stacks
        self._namings = namings
        self._places = [sorted(naming.owners) for naming in namings]
        self._graph = next((naming.graph for naming in namings if naming.graph), "")
        self._devices: list[ProfiledDevice] = []
        self._owners: dict[Owner, int] = {}
        # By the number of the device, pool, stack and owner.
        self._rows: dict[tuple[int, str, int | None, int | None], list[int]] = {}

    def add(
        self,
        index: int,
        device: ProfiledDevice,
        lifetimes: Iterable[Lifetime],
        unnamed: Callable[[Lifetime], str],
        *,
        live_at: int,
        peak_at: int | None = None,
        rest_bytes: int = 0,
    ) -> None:
        """Add the allocations of one device with this index in the process.

        `live_at` and `peak_at` are the indices of the entries after which they are counted. `unnamed` returns the kind
        of owner of an allocation without a stack and without an owner. `rest_bytes` are unknown parts of them.
        """
        number = len(self._devices)
        self._devices.append(device)
        for life in resting(lifetimes):
            live = life.lived_at(live_at)
            peak = peak_at is not None and life.lived_at(peak_at)
            if not live and not peak:
                continue
            owner = self._owner(index, life)
            if owner is None and life.stack is None:
                kind = unnamed(life)
                owner = Owner(kind, self._graph if kind == "unseen" else "")
            row = self._rows.setdefault((number, life.pool, life.stack, self._number(owner)), [0, 0, 0, 0])
            if live:
                row[0] += life.size_bytes
                row[1] += 1
            if peak:
                row[2] += life.size_bytes
                row[3] += 1
        if rest_bytes:
            rest = Owner("unseen", "rounded up by the allocator")
            self._rows[number, "default", None, self._number(rest)] = [rest_bytes, 0, 0, 0]

    def profile(self, *, notes: Sequence[str] = (), **values: Any) -> Profile:
        """Return the profile with these rows, and remember its largest owners."""
        known = [device.peak_bytes is not None for device in self._devices]
        profile = Profile(
            devices=tuple(self._devices),
            rows=tuple(
                Row(*key, *(sums if known[key[0]] else [*sums[:2], None, None])) for key, sums in self._rows.items()
            ),
            stacks=tuple(self._stacks.stacks),
            frames=tuple(self._stacks.frames),
            owners=tuple(self._owners),
            notes=tuple(dict.fromkeys([*(note for naming in self._namings for note in naming.notes), *notes])),
            **values,
        )
        sizes: Counter[str] = Counter()
        for row in profile.rows:
            owner = None if row.owner is None else profile.owners[row.owner]
            sizes["no owner" if owner is None else f"{owner.kind} {owner.name}".strip()] += row.live_bytes
        _latest[:] = [LatestOwners(time.monotonic() - profile.age_seconds, sizes.most_common(_LATEST_OWNERS))]
        return profile

    def _owner(self, index: int, life: Lifetime) -> Owner | None:
        """Return what holds a block, if the block lived while addresses were read."""
        for naming, places in zip(self._namings, self._places):
            # Otherwise another block had the address then, and the name belongs to that block.
            if life.allocated_us > naming.started_us or (life.freed_us is not None and life.freed_us < naming.ended_us):
                continue
            place = bisect_left(places, (index, life.address))
            if place < len(places) and places[place] < (index, life.address + life.size_bytes):
                return naming.owners[places[place]]
        return None

    def _number(self, owner: Owner | None) -> int | None:
        return None if owner is None else self._owners.setdefault(owner, len(self._owners))


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
