"""The reporter's work on a profile gives way to the user's threads, and does not starve beside them."""

from __future__ import annotations

import threading
import types
from typing import Any

import pytest

from gpumem_client.profile import heap_blocks
from gpumem_client.profile.recorder import Recorder
from gpumem_client.wire.errors import CommandRefusedError
from tests.support.waiting import patient


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
