"""The work of each second with a snapshot."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.housekeeping import keeping_records
from tests.support.waiting import wait_for

SNAPSHOT = Snapshot(0.5, None)


def keeping(**chores: Callable[[Snapshot], None]) -> AbstractContextManager[None]:
    """Keep records with a clock that stands in the middle of a second, so that the work is due at once."""
    return keeping_records(lambda: SNAPSHOT, chores, clock=lambda: 0.5, wall_clock=lambda: 0.5)


def test_a_failing_chore_of_a_second_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: Snapshot) -> None:
        raise RuntimeError("broken")

    seen: list[Snapshot] = []
    with keeping(failing=failing, seen=seen.append):
        wait_for(lambda: len(seen) >= 2, "two seconds")
    assert seen[0] is SNAPSHOT
    assert [record.levelname for record in caplog.records if record.name.endswith("housekeeping")] != []


def test_a_chore_that_hangs_does_not_delay_the_end() -> None:
    hangs, end = threading.Event(), threading.Event()

    def hanging(_: Snapshot) -> None:
        hangs.set()
        end.wait(60)

    with keeping(hanging=hanging):
        assert hangs.wait(10)
        started_seconds = time.monotonic()
    assert time.monotonic() - started_seconds < 10
    assert all(thread.daemon for thread in threading.enumerate() if thread.name.startswith("gpumem-second"))
    end.set()
