"""The work of each second with a snapshot."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.housekeeping import keep_records


async def test_a_failing_chore_of_a_second_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: Snapshot) -> None:
        raise RuntimeError("broken")

    seen: list[Snapshot] = []
    snapshot = Snapshot(0.5, None)
    # The clock stands in the middle of a second, so the work of each second is due at once.
    keeping = keep_records(
        lambda: snapshot, {"failing": failing, "seen": seen.append}, clock=lambda: 0.5, wall_clock=lambda: 0.5
    )
    with contextlib.suppress(asyncio.TimeoutError):
        await asyncio.wait_for(keeping, 1.0)
    assert seen[:2] == [snapshot] * 2
    assert [record.levelname for record in caplog.records if record.name.endswith("housekeeping")] != []
