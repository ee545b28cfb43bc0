"""The reporter's work on a profile gives way to the user's threads, and does not starve beside them."""

from __future__ import annotations

import types

import pytest

from gpumem_client.profile import blocks


@pytest.mark.parametrize(("sleep_seconds", "share"), [(0.0003, 0.7), (0.005, 0.45), (0.5, 0.0)])
def test_work_rests_often_but_not_for_most_of_the_time(
    monkeypatch: pytest.MonkeyPatch, sleep_seconds: float, share: float
) -> None:
    now = worked = slice_ = longest = 0.0

    def sleep(_: float) -> None:
        nonlocal now, slice_
        now, slice_ = now + sleep_seconds, 0.0

    monkeypatch.setattr(blocks, "time", types.SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    for _ in blocks.resting(range(40_000)):
        now, worked, slice_ = now + 1e-5, worked + 1e-5, slice_ + 1e-5
        longest = max(longest, slice_)
    assert worked / now > share
    assert longest < 0.006
