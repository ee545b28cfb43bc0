"""The store, and the rule of shares by which it chooses who loses."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_client.wire.protocol import CommandResult, OutOfMemory
from gpumem_exporter.core.container import HERE, UNKNOWN, Place
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import ReportingProcess
from gpumem_exporter.core.shares import Shares
from gpumem_exporter.core.store import Store
from gpumem_exporter.errors import ReporterSupersededError, TooManyProcessesError, UnknownDeviceError
from tests.support.builders.builders import UUIDS, device, node, report, sample

CONTAINER = Place(known=True, container="c" * 64)


@pytest.fixture
def store() -> Store:
    return Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=2)


def _put(
    store: Store, pid: int = 100, now: float = 0.0, owner_uid: int | None = None, **changes: Any
) -> ReportingProcess:
    host_pid, place = changes.pop("host_pid", pid), changes.pop("place", UNKNOWN)
    return store.put_report(
        report(pid, **changes),
        host_pid=host_pid,
        owner_uid=owner_uid,
        place=place,
        now_seconds=now,
        now_unix_seconds=now,
    )


UNSEEN: dict[str, Any] = {"host_pid": None}


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        ({}, {"session_started_seconds": 2.0}, "second"),
        ({}, {"session_started_seconds": 0.5}, "first"),
        ({}, {"session_started_seconds": 0.5, "start_time_ticks": 2000}, "second"),  # the pid was reused
        ({}, {"session_started_seconds": 2.0, "start_time_ticks": 500}, "first"),
        ({"session_started_seconds": 1e9}, {"session_started_seconds": 4.5, "now": 5.0}, "second"),
        ({"owner_uid": None}, {"owner_uid": 1001}, "second"),
        ({"owner_uid": 1001}, {"owner_uid": None}, "first"),
        ({"owner_uid": 1001}, {"owner_uid": 1002}, "first second"),
        ({"owner_uid": 0, "place": HERE}, {"owner_uid": 0, "place": CONTAINER}, "first second"),
        ({"owner_uid": 0, "place": CONTAINER}, {"owner_uid": 0, "place": CONTAINER, **UNSEEN}, "first"),
        ({"owner_uid": 1000, **UNSEEN}, {"owner_uid": 1000, "start_time_ticks": 2000, **UNSEEN}, "first"),
    ],
)
def test_which_of_two_reporters_with_one_pid_is_kept(
    store: Store, first: dict[str, Any], second: dict[str, Any], kept: str
) -> None:
    for sequence in (1, 2):
        _put(store, **{"session": "first", "now": 3.0, "sequence": sequence, **first})
    put = partial(_put, store, **{"session": "second", "now": 3.0, **second})
    if "second" in kept:
        put()
    else:
        with pytest.raises(ReporterSupersededError):
            put()
    assert " ".join(each.report.process.session for each in store.snapshot(5.0).processes) == kept
    assert len(store.take_displaced()) == (first.get("owner_uid", 0) is None)
    assert store.take_displaced() == ()


def test_attested_reports_replace_unattested_ones_when_there_is_no_room(store: Store) -> None:
    _put(store, 1, owner_uid=1001)
    _put(store, 2, owner_uid=None)
    _put(store, 3, owner_uid=1001)
    assert {process.key.pid for process in store.snapshot(0.0).processes} == {1, 3}
    with pytest.raises(TooManyProcessesError):
        _put(store, 4, owner_uid=None)


def test_the_user_with_the_most_processes_makes_room_for_others() -> None:
    store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=6)
    for pid in range(1, 7):
        _put(store, pid, owner_uid=1001)
    for pid in range(11, 14):
        _put(store, pid, owner_uid=1002)
    for owner_uid in (1001, 1002):
        with pytest.raises(TooManyProcessesError):
            _put(store, 21, owner_uid=owner_uid)
    assert [process.key.pid for process in store.snapshot(0.0).processes] == [1, 2, 3, 11, 12, 13]


def test_a_refused_report_displaces_no_process(store: Store) -> None:
    store.put_reading(node(device(UUIDS[0])))
    for pid in (1, 2):
        _put(store, pid, owner_uid=1001)
    with pytest.raises(UnknownDeviceError, match="GPU-nowhere"):
        _put(store, 3, owner_uid=1002, devices=(sample("GPU-nowhere"), sample("GPU-elsewhere")))
    with pytest.raises(TooManyProcessesError, match=r"--report\.max-processes"):
        _put(store, 3, owner_uid=1001)
    _put(store, 2, owner_uid=1001, sequence=2)
    assert {process.key.pid for process in store.snapshot(0.0).processes} == {1, 2}
    _put(store, 3, owner_uid=1001, now=16.0)  # both are silent by now
    assert [process.key.pid for process in store.snapshot(16.0).processes] == [3]


def test_a_user_has_a_share_of_the_page() -> None:
    store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=100)
    large: dict[str, Any] = {
        "devices": tuple(sample(f"GPU-{number:0120}") for number in range(64)),
        "workload": "w" * 128,
        "rank": "r" * 128,
    }
    for pid in range(1, 9):
        _put(store, pid, owner_uid=1001, **large)
    with pytest.raises(TooManyProcessesError, match=r"uid 1001 .* --report\.max-processes"):
        _put(store, 9, owner_uid=1001, **large)
    _put(store, 9, owner_uid=1001)
    with pytest.raises(TooManyProcessesError):
        _put(store, 9, owner_uid=1001, **large, sequence=2)
    _put(store, 8, owner_uid=1001, **large, sequence=2)
    _put(store, 10, owner_uid=1002, **large)


def test_silent_processes_of_one_user_do_not_hide_those_of_others(store: Store) -> None:
    _put(store, 1, owner_uid=1001, now=0.0)
    for pid in range(2, 6):
        _put(store, pid, owner_uid=1002, now=float(pid * 20))
    assert [silent.key.pid for silent in store.snapshot(120.0).silent] == [1, 5]


def test_results_and_errors_are_not_stored(store: Store) -> None:
    taken = _put(store, ooms=(OutOfMemory(UUIDS[0], 1),), results=(CommandResult("a", "done"),))
    assert (len(taken.report.ooms), len(taken.report.results)) == (1, 1)
    (stored,) = store.snapshot(0.0).processes
    assert (stored.report.ooms, stored.report.results) == ((), ())


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


def test_a_true_process_takes_the_bytes_of_invented_ones_of_its_share(store: Store) -> None:
    large: dict[str, Any] = {
        "devices": tuple(sample(f"GPU-{index}") for index in range(64)),
        "workload": "\U0001f4a3" * 128,
    }
    with contextlib.suppress(TooManyProcessesError):
        for pid in range(100, 200):
            _put(store, pid, owner_uid=0, place=CONTAINER, host_pid=None, **large)
    invented = len(store.snapshot(0.0).processes)
    _put(store, 1, owner_uid=1000, place=CONTAINER, **large)
    shown = store.snapshot(0.0).processes
    assert len(shown) <= invented
    assert [process.key.pid for process in shown if process.seen] == [1]


def test_no_report_expires_while_the_exporter_is_paused_nor_because_it_was() -> None:
    store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=2)
    store.put_report(report(7), host_pid=7, now_seconds=100.0, now_unix_seconds=0.0)
    for second in range(100, 111):
        store.beat(float(second))
    assert [len(store.snapshot(135.0).processes), len(store.snapshot(135.0).silent)] == [1, 0], (
        "any thread may be first"
    )
    store.beat(135.0)
    for second in range(136, 141):
        store.beat(float(second))
        assert store.snapshot(float(second)).silent == ()
    store.beat(141.0)
    assert len(store.snapshot(141.0).silent) == 1, "15 s without the pause"


OWNERS = "abcd"
PUTS = st.lists(st.tuples(st.sampled_from(OWNERS), st.integers(1, 9)), max_size=60)


@given(puts=PUTS, limit=st.integers(1, 40), of_owner=st.none() | st.integers(1, 20))
def test_the_owner_with_the_most_loses(puts: list[tuple[str, int]], limit: int, of_owner: int | None) -> None:
    shares = Shares(limit, of_owner=of_owner)
    items: dict[str, list[int]] = {owner: [] for owner in OWNERS}
    for owner, size in puts:
        shares.put(owner, size)
        items[owner].append(size)
        while (loser := shares.over()) is not None:
            sizes = {each: sum(items[each]) for each in OWNERS}
            assert sizes[loser] == max(sizes.values())
            if of_owner is None or sizes[loser] <= of_owner:
                assert sizes[loser] * len([each for each in OWNERS if sizes[each]]) > limit
            if loser != owner:  # of equal owners, the owner that put
                assert sizes[loser] > sizes[owner]
            shares.drop(loser, items[loser].pop(0))
        assert {owner: shares[owner] for owner in OWNERS} == {owner: sum(items[owner]) for owner in OWNERS}
        assert shares.total == sum(map(sum, items.values())) <= limit
        assert of_owner is None or max(map(sum, items.values())) <= of_owner
