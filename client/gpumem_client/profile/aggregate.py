"""Adds up allocations to the rows of a profile: by device, pool, stack and owner."""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Tuple

from gpumem_client.profile.heap_blocks import Stacks, resting
from gpumem_client.profile.lifetimes import Lifetime
from gpumem_client.profile.profile_types import Owner, Profile, ProfiledDevice, Row

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
