"""The thread of each second."""

from __future__ import annotations

import pytest

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.housekeeping import EachSecond
from tests.support.waiting import patient, wait_for


def test_a_failing_chore_of_a_second_affects_no_other(caplog: pytest.LogCaptureFixture) -> None:
    def failing(_: Snapshot) -> None:
        raise RuntimeError("broken")

    seen: list[Snapshot] = []
    snapshot = Snapshot(0.5, None)
    # The clock stands in the middle of a second, so the work of each second is due at once.
    chores = {"failing": failing, "seen": seen.append}
    thread = EachSecond(lambda: snapshot, chores, clock=lambda: 0.5, wall_clock=lambda: 0.5)
    thread.start()
    wait_for(lambda: len(seen) >= 2, "two seconds")
    thread.stop(patient(10))
    assert seen[0] is snapshot
    assert [record.levelname for record in caplog.records if record.name.endswith("housekeeping")] != []
