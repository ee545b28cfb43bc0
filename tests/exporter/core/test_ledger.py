from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.ledger import CATEGORIES, DeviceLedger, fragmented_bytes, node_ledgers, node_shares
from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from tests.support.builders.builders import UUIDS, device, node, reporting, sample


def device_ledger(reading: DeviceReading, processes: list[ReportingProcess]) -> DeviceLedger:
    """The ledger of the only device of a node."""
    snapshot = Snapshot(taken_seconds=0.0, node=node(reading), processes=tuple(processes))
    return node_ledgers(snapshot)[reading.uuid]


_BYTES = st.integers(min_value=0, max_value=1 << 50)
_PIDS = st.integers(min_value=1, max_value=12)


@st.composite
def _samples(draw: st.DrawFn) -> DeviceSample:
    known = sample(UUIDS[0], draw(_BYTES), draw(_BYTES), draw(_BYTES))
    forgotten = draw(st.sets(st.sampled_from(["allocated_bytes", "reserved_bytes", "reclaimable_bytes"])))
    unknown: dict[str, Any] = dict.fromkeys(forgotten)
    return dataclasses.replace(known, **unknown)


@st.composite
def _devices(draw: st.DrawFn) -> DeviceReading:
    total, free, reserved = draw(_BYTES), draw(_BYTES), draw(st.none() | _BYTES)
    processes = draw(st.none() | st.dictionaries(_PIDS, st.none() | _BYTES, max_size=8))
    reading = device(total=total, reserved=reserved, processes=processes)
    assert reading.memory is not None
    # `used` is the driver's own value and may be inconsistent with the other three
    memory = dataclasses.replace(reading.memory, free_bytes=free, used_bytes=draw(_BYTES))
    return dataclasses.replace(reading, memory=memory)


@st.composite
def _processes(draw: st.DrawFn) -> list[ReportingProcess]:
    pids = draw(st.lists(_PIDS, unique=True, max_size=8))
    return [reporting(pid, devices=(draw(_samples()),), host_pid=draw(st.sampled_from([pid, None]))) for pid in pids]


@given(_devices(), _processes())
@settings(max_examples=40)
def test_categories_add_up_to_the_total_for_any_values(
    reading: DeviceReading, processes: list[ReportingProcess]
) -> None:
    ledger = device_ledger(reading, processes)
    assert sum(ledger.categories.values()) == ledger.total_bytes
    assert list(ledger.categories) == [name for name in CATEGORIES if name in ledger.categories]


def test_memory_that_the_driver_hides_is_unattributed() -> None:
    """There are two reporters and two other processes; the driver has values for all, some or none of them."""
    trainers = [reporting(pid, devices=(sample(allocated=100, reclaimable=50),)) for pid in (1, 2)]

    def owned(**hidden: None) -> dict[str, int]:
        used_by_pid: dict[int, int | None] = {1: 170, 2: 180, 3: 40, 4: 60}
        used_by_pid |= {int(name.removeprefix("pid")): None for name in hidden}
        ledger = device_ledger(device(total=1000, used=500, processes=used_by_pid), trainers)
        assert sum(ledger.categories.values()) == 1000
        assert (ledger.categories["torch_allocated"], ledger.categories["torch_reclaimable"]) == (200, 100)
        names = ("non_torch", "other_processes", "unattributed")
        return {name: ledger.categories[name] for name in names if name in ledger.categories}

    assert owned() == {"non_torch": 50, "other_processes": 100, "unattributed": 50}
    assert owned(pid1=None, pid4=None) == {"non_torch": 30, "other_processes": 40, "unattributed": 130}
    assert owned(pid1=None, pid2=None) == {"other_processes": 100, "unattributed": 100}
    assert owned(pid3=None, pid4=None) == {"non_torch": 50, "unattributed": 150}


def test_a_device_whose_memory_is_unknown_has_its_processes() -> None:
    unknown = dataclasses.replace(device(processes={1: 300, 2: 50}), memory=None)
    trainer = reporting(1, devices=(sample(allocated=200),))
    shares = node_shares(Snapshot(taken_seconds=0.0, node=node(unknown), processes=(trainer,)))
    assert [(share.pid, share.used_bytes, share.process, share.non_torch_bytes) for share in shares[UUIDS[0]]] == [
        ("1", 300, trainer, 100),
        ("2", 50, None, None),
    ]
    assert node_shares(Snapshot(taken_seconds=0.0, node=None)) == {}


def test_reclaimable_is_the_sum_of_the_known_values_and_absent_without_any() -> None:
    """Cache of an unknown kind counts as fragmented; a process without a cache makes nothing unknown."""

    def torch(*samples: DeviceSample) -> dict[str, int]:
        reading = device(total=1000, used=900, processes=dict.fromkeys(range(1, len(samples) + 1), 300))
        ledger = device_ledger(reading, [reporting(pid, devices=(own,)) for pid, own in enumerate(samples, start=1)])
        assert sum(ledger.categories.values()) == 1000
        return {name: size for name, size in ledger.categories.items() if name.startswith("torch_")}

    split = sample(allocated=100, reclaimable=70, fragmented=30)
    assert [fragmented_bytes(each) for each in (split, dataclasses.replace(split, reclaimable_bytes=None))] == [
        30,
        None,
    ]
    unsplit = dataclasses.replace(split, reclaimable_bytes=None)
    without_cache = dataclasses.replace(sample(allocated=100), reclaimable_bytes=None)
    without_books = dataclasses.replace(split, allocated_bytes=None)
    assert torch(unsplit) == {"torch_allocated": 100, "torch_fragmented": 100}
    assert torch(unsplit, without_cache) == {"torch_allocated": 200, "torch_fragmented": 100}
    assert torch(unsplit, split) == {"torch_allocated": 200, "torch_reclaimable": 70, "torch_fragmented": 130}
    assert torch(without_cache) == {"torch_allocated": 100, "torch_reclaimable": 0, "torch_fragmented": 0}
    assert torch(without_books) == {"torch_allocated": 130, "torch_reclaimable": 70, "torch_fragmented": 0}
    assert torch() == {"torch_allocated": 0, "torch_reclaimable": 0, "torch_fragmented": 0}
