"""Adds up allocations to the rows of a profile: by device, pool, stack and owner."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Tuple

from gpumem_client.profile.heap_blocks import Stacks, resting
from gpumem_client.profile.lifetimes import Lifetime
from gpumem_client.profile.profile_types import Owner, Profile, Row

# Device, pool, stack, owner.
_Key = Tuple[int, str, "int | None", "int | None"]


@dataclass(frozen=True)
class Naming:
    """One search for the owners of storages, and when it read their addresses, in microseconds since the epoch."""

    started_us: int
    ended_us: int
    addresses: Mapping[int, list[int]]
    """By device index, sorted."""
    owners: Mapping[tuple[int, int], Owner]
    graph: str = ""
    """What keeps an autograd graph, and with it blocks that no Python object refers to; empty if it is not known."""

    def owner(self, device: int, life: Lifetime) -> Owner | None:
        """Return what holds a block, if the block lived while addresses were read."""
        # Otherwise another block had the address then, and the name belongs to that block.
        if life.allocated_us > self.started_us or (life.freed_us is not None and life.freed_us < self.ended_us):
            return None
        addresses = self.addresses.get(device, [])
        place = bisect_left(addresses, life.address)
        if place < len(addresses) and addresses[place] < life.address + life.size_bytes:
            return self.owners[device, addresses[place]]
        return None


class Rows:
    """The rows of a profile, while allocations are added to them."""

    def __init__(self, stacks: Stacks, namings: Iterable[Naming]) -> None:
        self._owners: list[Owner] = []
        self._stacks = stacks
        self._namings = tuple(namings)
        self._graph = next((naming.graph for naming in self._namings if naming.graph), "")
        self._numbers: dict[Owner, int] = {}
        self._rows: dict[_Key, list[int]] = {}

    def add(
        self,
        index: int,
        device: int,
        lifetimes: Iterable[Lifetime],
        unnamed: Callable[[Lifetime], str],
        *,
        live_at: int,
        peak_at: int | None = None,
    ) -> None:
        """Add the allocations of one device: its index in the process, and in the profile.

        `live_at` and `peak_at` are the indices of the entries after which they are counted. `unnamed` returns the kind
        of owner of an allocation without a stack and without an owner.
        """
        for life in resting(lifetimes):
            live = life.lived_at(live_at)
            peak = peak_at is not None and life.lived_at(peak_at)
            if not live and not peak:
                continue
            owner = next((owner for naming in self._namings if (owner := naming.owner(index, life))), None)
            if owner is None and life.stack is None:
                kind = unnamed(life)
                owner = Owner(kind, self._graph if kind == "unseen" else "")
            number = None if owner is None else self._number(owner)
            row = self._rows.setdefault((device, life.pool, life.stack, number), [0, 0, 0, 0])
            if live:
                row[0] += life.size_bytes
                row[1] += 1
            if peak:
                row[2] += life.size_bytes
                row[3] += 1

    def add_rest(self, device: int, owner: Owner, size_bytes: int) -> None:
        """Add bytes of blocks that are counted already."""
        self._rows[device, "default", None, self._number(owner)] = [size_bytes, 0, 0, 0]

    def profile(self, with_peak: Iterable[int] = (), **values: Any) -> Profile:
        """Return the profile with these rows. `with_peak` are its devices whose highest moment is known."""
        known = frozenset(with_peak)
        return Profile(
            rows=tuple(
                Row(*key, *(sums if key[0] in known else [*sums[:2], None, None])) for key, sums in self._rows.items()
            ),
            stacks=tuple(self._stacks.stacks),
            frames=tuple(self._stacks.frames),
            owners=tuple(self._owners),
            **values,
        )

    def _number(self, owner: Owner) -> int:
        number = self._numbers.setdefault(owner, len(self._owners))
        if number == len(self._owners):
            self._owners.append(owner)
        return number
