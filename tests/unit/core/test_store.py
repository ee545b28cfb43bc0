from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.core.samples import NodeReading, ReportingProcess
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import ReporterSupersededError, TooManyProcessesError, UnknownDeviceError
from tests.support.builders import UUIDS, device, node, report, sample


@pytest.fixture
def store() -> Store:
    return Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=2)


def _put(store: Store, pid: int = 100, now: float = 0.0, **changes: Any) -> ReportingProcess:
    return store.put_report(report(pid, **changes), host_pid=pid, now_seconds=now, now_unix_seconds=now)


def test_a_snapshot_shows_the_last_report_of_each_process(store: Store) -> None:
    _put(store, sequence=1, step=1)
    _put(store, sequence=2, step=2)
    (process,) = store.snapshot(0.0).processes
    assert process.report.step == 2


def test_an_older_report_of_the_same_session_changes_nothing(store: Store) -> None:
    _put(store, sequence=2, step=2)
    assert _put(store, sequence=1, step=1).report.step == 2


def test_an_expired_reporter_is_listed_as_silent(store: Store) -> None:
    _put(store, now=0.0, rank="3")
    assert store.snapshot(15.0).processes
    snapshot = store.snapshot(15.1)
    assert snapshot.processes == ()
    assert [(silent.key.pid, silent.rank) for silent in snapshot.silent] == [(100, "3")]


def test_a_silent_reporter_that_reports_again_is_shown_again(store: Store) -> None:
    _put(store, now=0.0, sequence=1)
    store.snapshot(20.0)
    _put(store, now=21.0, sequence=2)
    snapshot = store.snapshot(21.0)
    assert len(snapshot.processes) == 1
    assert snapshot.silent == ()


def test_an_expired_poll_is_not_shown(store: Store) -> None:
    store.put_reading(node(device(), taken=10.0))
    assert store.snapshot(15.0).node is not None
    assert store.snapshot(15.1).node is None


def test_a_new_session_replaces_the_earlier_one_of_the_same_process(store: Store) -> None:
    _put(store, session="first", session_started_seconds=1.0, sequence=50)
    taken = _put(store, session="second", session_started_seconds=2.0, sequence=1)
    assert taken.report.process.session == "second"
    with pytest.raises(ReporterSupersededError):
        _put(store, session="first", session_started_seconds=1.0, sequence=51)


def test_a_later_process_replaces_an_earlier_one_with_the_same_pid(store: Store) -> None:
    _put(store, session="old", start_time_ticks=1000, session_started_seconds=900.0)
    _put(store, session="new", start_time_ticks=2000, session_started_seconds=1.0)
    with pytest.raises(ReporterSupersededError):
        _put(store, session="old", start_time_ticks=1000, session_started_seconds=900.0, sequence=2)


def test_the_same_pid_in_two_namespaces_means_two_processes(store: Store) -> None:
    _put(store, pid_namespace=1)
    _put(store, pid_namespace=2)
    assert len(store.snapshot(0.0).processes) == 2


def test_new_processes_beyond_the_limit_are_rejected_and_known_ones_are_accepted(store: Store) -> None:
    _put(store, 1)
    _put(store, 2)
    with pytest.raises(TooManyProcessesError, match=r"--report\.max-processes"):
        _put(store, 3)
    _put(store, 2, sequence=2)
    assert {process.key.pid for process in store.snapshot(0.0).processes} == {1, 2}


def test_silent_processes_make_room_for_new_ones(store: Store) -> None:
    _put(store, 1)
    _put(store, 2)
    _put(store, 3, now=16.0)
    assert {process.key.pid for process in store.snapshot(16.0).processes} == {3}


def test_a_report_with_only_unknown_devices_is_rejected_and_the_error_names_one(store: Store) -> None:
    store.put_reading(node(device(UUIDS[0])))
    with pytest.raises(UnknownDeviceError, match="GPU-nowhere"):
        _put(store, devices=(sample("GPU-nowhere"), sample("GPU-elsewhere")))
    assert store.snapshot(0.0).processes == ()


@pytest.mark.parametrize(
    ("reading", "reported", "accepted"),
    [
        (node(device(UUIDS[0]), device(UUIDS[2], gpu="2")), UUIDS, (UUIDS[0], UUIDS[2])),
        (node(device(UUIDS[0])), (), ()),
        (node(up=False), ("GPU-anything",), ("GPU-anything",)),
        (node(device(UUIDS[0]), device("", gpu="1")), UUIDS[:2], UUIDS[:2]),
    ],
    ids=["some are unknown", "no devices", "the driver is down", "a device without a uuid"],
)
def test_samples_of_devices_that_the_driver_may_have_are_accepted(
    store: Store, reading: NodeReading, reported: tuple[str, ...], accepted: tuple[str, ...]
) -> None:
    store.put_reading(reading)
    _put(store, devices=tuple(sample(uuid) for uuid in reported))
    (process,) = store.snapshot(0.0).processes
    assert tuple(each.uuid for each in process.report.devices) == tuple(accepted)
