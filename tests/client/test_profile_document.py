"""The document of a memory profile stays within its limits, and its sums stay exact."""

from __future__ import annotations

import json
import random
import zlib

import pytest

from gpumem_client.profile import encoded
from gpumem_client.profile.profile_types import Frame, Owner, Profile, ProfiledDevice, Row
from gpumem_client.wire.protocol import ProcessIdentity

IDENTITY = ProcessIdentity(1, 2, 3, "session", 4.0)


def test_the_smallest_rows_of_a_long_profile_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 100_000
    monkeypatch.setattr(encoded, "MAX_COMPRESSED_BYTES", limit)
    rng = random.Random(7)
    count = 4_000
    rows = [
        Row(at % 2, "default", at % 500, at if at % 3 else None, rng.randrange(1 << 40), 1, rng.randrange(1 << 40), 2)
        for at in range(count)
    ]
    live, peak = (
        [sum(size(row) for row in rows if row.device == device) for device in (0, 1)]
        for size in (lambda row: row.live_bytes, lambda row: row.peak_bytes)
    )
    frames = tuple(Frame(rng.randbytes(20).hex(), f"\udcff/{rng.randbytes(20).hex()}.py", at) for at in range(2_000))
    profile = Profile(
        "id",
        "action",
        devices=tuple(ProfiledDevice(f"GPU-{at}", live[at], peak_bytes=peak[at]) for at in (0, 1)),
        rows=tuple(rows),
        stacks=tuple(tuple(rng.randrange(2_000) for _ in range(30)) for _ in range(500)),
        frames=frames,
        owners=tuple(Owner("tensors", rng.randbytes(20).hex()) for _ in range(count)),
    )
    body = encoded.encode(profile, IDENTITY)
    assert len(body) <= limit
    document = json.loads(zlib.decompress(body, 31))
    kept = document["rows"]
    assert 100 < len(kept) < count
    assert [[sum(row[column] for row in kept if row[0] == device) for device in (0, 1)] for column in (4, 6)] == [
        live,
        peak,
    ]
    merged = [row for row in kept if row[3] is not None and document["owners"][row[3]][0] == "merged"]
    assert sorted(row[0] for row in merged) == [0, 1]
    largest = max(rows, key=lambda row: row.live_bytes)
    same = next(row for row in kept if row[4] == largest.live_bytes)
    stack = [document["frames"][frame] for frame in document["stacks"][same[2]]]
    names = [frames[frame].function for frame in profile.stacks[largest.stack or 0]]
    assert [frame[0] for frame in stack] == names
    assert document["process"]["pid"] == 1
