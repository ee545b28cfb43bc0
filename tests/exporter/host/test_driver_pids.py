"""When the driver's pids count as those of the exporter's PID namespace."""

from __future__ import annotations

import dataclasses

import pytest

from gpumem_exporter.core.samples import NodeReading, ProcessFacts
from gpumem_exporter.host.pid_namespaces import DriverPids
from tests.support.builders import UUIDS, device, node


def reading(*listed: int, visible: tuple[int, ...] = ()) -> NodeReading:
    """A poll of two devices. The driver lists these pids on the first; the exporter sees the visible ones."""
    devices = (device(UUIDS[0], processes=dict.fromkeys(listed, 1)), device(UUIDS[1], gpu="1", processes={}))
    return dataclasses.replace(node(*devices), facts={pid: ProcessFacts(pid, 1) for pid in visible})


@pytest.mark.parametrize(
    "unmatched", [reading(), reading(31337), reading(31337, 7, visible=(7,))], ids=["none", "foreign", "one by chance"]
)
def test_lists_that_cannot_be_matched_are_unknown(unmatched: NodeReading) -> None:
    pids = DriverPids()
    shown = pids.check(unmatched)
    assert [each.processes for each in shown.devices] == [None, None]
    assert [each.memory for each in shown.devices] == [each.memory for each in unmatched.devices]
    assert not shown.facts
    assert not pids.matched


def test_pids_stay_matched_from_the_first_list_of_visible_processes() -> None:
    pids = DriverPids()
    pids.check(reading())
    for later in (reading(7, 8, visible=(7, 8)), reading(), reading(7, 9, visible=(7,))):  # 9 exited
        assert pids.check(later) is later
        assert pids.matched


def test_a_driver_that_does_not_answer_decides_nothing() -> None:
    pids, down = DriverPids(), node(up=False)
    assert pids.check(down) is down
    assert not pids.matched
