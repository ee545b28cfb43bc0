from __future__ import annotations

import dataclasses
from typing import Any

from gpumem_exporter.core.samples import NodeReading, Snapshot
from gpumem_exporter.server.web.history import History
from tests.support.builders import MIB, UUIDS, device, node, reporting, sample

A, B = UUIDS[:2]


def history(**options: Any) -> History:
    return History(**{"reading_expiry_seconds": 5.0, "span_seconds": 10.0, "step_seconds": 2.0, **options})


def seen(reading: NodeReading | None, *processes: Any) -> Snapshot:
    return Snapshot(taken_seconds=0.0, node=reading, processes=processes)


def one_device(at: float, used: int = 10 * MIB) -> Snapshot:
    return seen(node(device(A, used=used, processes={}), taken=at))


def test_a_point_has_the_memory_in_use_and_the_allocated_memory() -> None:
    kept = history()
    process = reporting(7, devices=(sample(A, allocated=40 * MIB, reclaimable=8 * MIB),))
    reading = node(device(A, used=100 * MIB, reserved=20 * MIB, processes={7: 60 * MIB}), taken=4.0)
    kept.add(seen(reading, process))
    assert kept.document()["seconds"] == [4.0]
    assert kept.document()["devices"] == {A: {"in_use": [120], "allocated": [40]}}


def test_there_is_no_point_before_the_first_poll() -> None:
    kept = history()
    kept.add(seen(None))
    assert kept.newest_seconds is None
    assert kept.document()["seconds"] == []


def test_each_step_has_one_point() -> None:
    kept = history()
    for at in (0.0, 0.9, 1.9, 2.0, 2.0, 3.5, 4.12345):
        kept.add(one_device(at))
    assert kept.document()["seconds"] == [0.0, 2.0, 4.123]


def test_a_reader_gets_the_points_after_its_last_one() -> None:
    kept = history()
    for at in (0.0, 2.12345, 4.0):
        kept.add(one_device(at, used=int(at) * MIB))
    later = kept.document(since_seconds=kept.document()["seconds"][1])
    assert (later["seconds"], later["devices"][A]["in_use"]) == ([4.0], [4])


def test_points_older_than_the_span_are_dropped() -> None:
    kept = history()
    for at in range(0, 100, 2):
        kept.add(one_device(float(at), used=at * MIB))
    document = kept.document()
    assert document["seconds"] == [88.0, 90.0, 92.0, 94.0, 96.0, 98.0]
    assert document["devices"][A]["in_use"] == [88, 90, 92, 94, 96, 98]


def test_a_device_that_cannot_be_read_has_a_gap() -> None:
    kept = history()
    kept.add(one_device(0.0))
    kept.add(seen(node(dataclasses.replace(device(A), memory=None, error="lost"), taken=2.0)))
    kept.add(seen(node(taken=4.0, up=False)))
    assert kept.document(since_seconds=2.0)["devices"] == {}
    kept.add(one_device(6.0))
    assert kept.document()["devices"][A]["in_use"] == [10, None, None, 10]


def test_the_gap_is_at_least_the_expiry_of_a_reading() -> None:
    assert history(reading_expiry_seconds=90.0).document()["gap_seconds"] == 90.0


def test_a_new_device_has_gaps_and_a_removed_one_disappears_with_its_last_point() -> None:
    kept = history()
    kept.add(one_device(0.0))
    both = node(device(A, used=MIB, processes={}), device(B, gpu="1", used=2 * MIB, processes={}), taken=2.0)
    kept.add(seen(both))
    assert kept.document()["devices"][B]["in_use"] == [None, 2]
    for at in (4.0, 6.0, 8.0, 10.0, 12.0, 14.0):
        kept.add(one_device(at))
    assert set(kept.document()["devices"]) == {A}
