"""The largest owners of the last profile, for other surfaces in the same process."""

from __future__ import annotations

import time
from collections import Counter
from typing import NamedTuple

from gpumem_client.profile.profile_types import Profile

_OWNERS = 10


class LatestOwners(NamedTuple):
    """What held the most memory at the end of a profile."""

    taken_seconds: float
    """On the monotonic clock."""
    owners: list[tuple[str, int]]
    """Names and bytes, the largest first."""


_latest: list[LatestOwners] = []


def note_profile(profile: Profile) -> None:
    """Remember the owners of a profile. Called by the reporter's thread."""
    sizes: Counter[str] = Counter()
    for row in profile.rows:
        owner = profile.owners[row.owner] if row.owner is not None else None
        sizes[f"{owner.kind} {owner.name}".strip() if owner is not None else "no owner"] += row.live_bytes
    _latest[:] = [LatestOwners(time.monotonic() - profile.age_seconds, sizes.most_common(_OWNERS))]


def latest_owners() -> LatestOwners | None:
    """Return the owners of the last profile of this process; None without one. Any thread may call this."""
    return next(iter(_latest), None)
