"""Memory profiles: their document, their recording, and work that gives way to the user's threads."""

from __future__ import annotations

import json
import random
import threading
import types
import zlib
from typing import Any

import pytest

from gpumem_client.profile import aggregate, heap_blocks
from gpumem_client.profile.profile_types import Frame, Owner, Profile, ProfiledDevice, Row
from gpumem_client.profile.recorder import Recorder
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import ProcessIdentity
from tests.support.waiting import patient

IDENTITY = ProcessIdentity(1, 2, 3, "session", 4.0)


def test_the_smallest_rows_of_a_long_profile_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = 100_000
    monkeypatch.setattr(aggregate, "MAX_COMPRESSED_BYTES", limit)
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
    body = aggregate.encode(profile, IDENTITY)
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


@pytest.mark.parametrize(("sleep_seconds", "share"), [(0.0003, 0.7), (0.005, 0.45), (0.5, 0.0)])
def test_work_rests_often_but_not_for_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch, sleep_seconds: float, share: float
) -> None:
    now = worked = slice_ = longest = 0.0

    def sleep(_: float) -> None:
        nonlocal now, slice_
        now, slice_ = now + sleep_seconds, 0.0

    monkeypatch.setattr(heap_blocks, "time", types.SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    for _ in heap_blocks.resting(range(40_000)):
        now, worked, slice_ = now + 1e-5, worked + 1e-5, slice_ + 1e-5
        longest = max(longest, slice_)
    assert worked / now > share
    assert longest < 0.006


class Torch:
    """A torch whose recording of the allocator's history is on or off."""

    def __init__(self) -> None:
        self.records = False
        self.history = ""
        self._C = types.SimpleNamespace(
            _cuda_isHistoryEnabled=lambda: self.records, _cuda_record_memory_history=self._record_in_c
        )
        self.cuda = types.SimpleNamespace(memory=types.SimpleNamespace(_record_memory_history=self._record))

    def _record(self, enabled: str | None, **options: Any) -> None:
        self._C._cuda_record_memory_history(enabled, options)

    def _record_in_c(self, enabled: str | None, options: dict[str, Any]) -> None:
        self.records, self.history = enabled is not None, f"{options}"


def test_a_new_reporter_waits_for_the_recording_of_a_stopped_one_and_not_for_the_user_s() -> None:
    torch = Torch()
    ending, starting = Recorder(torch), Recorder(torch)
    ending.start(1000)
    ends = threading.Timer(0.1, ending.close)
    ends.start()
    assert starting.start_standing()
    ends.join(patient(30))
    assert starting.standing
    starting.close()
    torch.records = True
    assert not starting.start_standing()
    with pytest.raises(CommandRefusedError):
        starting.start(1000)
    assert torch.records, "the user's recording goes on"


def test_a_recording_that_the_program_starts_stays_whatever_its_settings_are() -> None:
    torch = Torch()
    record, in_c = torch.cuda.memory._record_memory_history, torch._C._cuda_record_memory_history
    recorder = Recorder(torch)
    assert recorder.start_standing()
    ours = torch.history
    recorder.start(1000)
    recorder.end()
    assert recorder.standing, "the client's own calls end nothing"
    assert torch.history == ours
    record(enabled="all", context="alloc", stacks="python", max_entries=20_000)
    assert not recorder.on
    with pytest.raises(CommandRefusedError):
        recorder.start(1000)
    recorder.close()
    assert torch.records, "the program's recording goes on"
    assert torch._C._cuda_record_memory_history == in_c, "the hook is removed"
    record(enabled=None)
    recorder.start(1000)
    record(enabled=None)
    assert not recorder.on, "the program has ended it"
    recorder.end()
    assert not torch.records
