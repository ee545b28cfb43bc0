from __future__ import annotations

from typing import Any

from gpumem_exporter.cli.top.history import History
from tests.support.top_documents import GIB, device, live

_NOW = 5000.0


def _devices(taken: float, *listed: dict[str, Any]) -> dict[str, Any]:
    return {"taken_unix_seconds": taken, "devices": [*(listed or (device("0"),))]}


def test_the_exporters_points_have_the_times_of_the_local_clock() -> None:
    history = History()
    history.take(live({"GPU-0": [1024, None, 2048]}, [90.0, 92.0, 94.0], clock_seconds=95.0), _NOW)
    assert history.past() == {"GPU-0": ((_NOW - 5, GIB), (_NOW - 1, 2 * GIB))}


def test_each_poll_is_added_once_and_a_step_of_two_seconds_has_its_latest_value() -> None:
    history = History()
    for now, taken in ((_NOW, 1.0), (_NOW + 1, 2.0), (_NOW + 2, 3.0), (_NOW + 4, 3.0), (_NOW + 5, 4.0)):
        history.add(_devices(taken), now)
    in_use = 64 * GIB
    assert history.past() == {"GPU-0": ((_NOW + 1, in_use), (_NOW + 2, in_use), (_NOW + 5, in_use))}
    history.add(_devices(5.0, device("0", memory={"total_bytes": 9, "free_bytes": 2})), _NOW + 5.5)
    assert history.past()["GPU-0"][2:] == ((_NOW + 5.5, 7),), "the line ends with the current value"


def test_a_device_that_cannot_be_read_has_no_point() -> None:
    history = History()
    unread = device("1", up=False, memory=None, ledger=None)
    unknown = device("2", memory={"total_bytes": 80 * GIB, "used_bytes": None, "free_bytes": None})
    history.add(_devices(1.0, device("0"), unread, unknown), _NOW)
    history.add({"taken_unix_seconds": None, "devices": [device("0")]}, _NOW + 10)
    assert {uuid: len(points) for uuid, points in history.past().items()} == {"GPU-0": 1}


def test_the_history_is_taken_at_first_and_after_a_gap() -> None:
    history = History()
    assert history.due(_NOW)
    history.take(live({"GPU-0": [1024]}, [95.0], clock_seconds=95.0), _NOW)
    for second in range(1, 30):
        assert not history.due(_NOW + second)
        history.add(_devices(float(second)), _NOW + second)
    assert history.due(_NOW + 40)


def test_a_history_in_another_format_is_read_once_a_minute() -> None:
    for document in ({}, {"moment": 1}, {"moment": {"clock_seconds": 1}, "history": {"seconds": [1], "devices": 7}}):
        history = History()
        history.take(document, _NOW)
        assert history.past() == {}
        assert not history.due(_NOW + 59)
        assert history.due(_NOW + 60)


def test_points_from_before_a_restart_of_the_exporter_are_kept() -> None:
    history = History()
    history.add(_devices(1.0), _NOW)
    history.add(_devices(2.0), _NOW + 10)
    history.take(live({"GPU-0": [1024, 2048]}, [8.0, 18.0], clock_seconds=20.0), _NOW + 20)
    assert history.past()["GPU-0"] == ((_NOW, 64 * GIB), (_NOW + 8, GIB), (_NOW + 18, 2 * GIB))


def test_points_older_than_ten_minutes_and_their_devices_are_dropped() -> None:
    history = History()
    history.add(_devices(1.0, device("0"), device("1")), _NOW)
    for second in range(2, 1200, 2):
        history.add(_devices(float(second)), _NOW + second)
    past = history.past()
    assert set(past) == {"GPU-0"}
    assert 300 <= len(past["GPU-0"]) <= 301
