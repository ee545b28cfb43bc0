"""The work of each second with a snapshot."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.housekeeping import keep_records
from tests.support.waiting import patient


async def test_a_failing_chore_of_a_second_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: Snapshot) -> None:
        raise RuntimeError("broken")

    seen: list[Snapshot] = []
    twice = threading.Event()

    def see(taken: Snapshot) -> None:
        seen.append(taken)
        if len(seen) == 2:
            twice.set()

    snapshot = Snapshot(0.5, None)
    # The clock stands in the middle of a second, so the work of each second is due at once.
    keeping = keep_records(
        lambda: snapshot, {"failing": failing, "seen": see}, clock=lambda: 0.5, wall_clock=lambda: 0.5
    )
    task = asyncio.ensure_future(keeping)
    assert await asyncio.to_thread(twice.wait, patient(10))
    task.cancel()
    await asyncio.wait([task])
    assert seen[0] is snapshot
    assert [record.levelname for record in caplog.records if record.name.endswith("housekeeping")] != []
