"""When a process was last active, from its reports and from the driver."""

from __future__ import annotations

import dataclasses
from typing import Any

from gpumem_exporter.core.samples import DeviceReading, ProcessFacts
from gpumem_exporter.core.store import Store
from tests.support.builders import UUIDS, device, node, report


class Bench:
    """A store that gets a reading of one device each second."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.store = Store(report_expiry_seconds=15.0, reading_expiry_seconds=5.0, max_processes=10)
        self.facts: dict[int, ProcessFacts] = {}

    def read(self, active: set[int] | None, *pids: int, seconds: float = 1.0, **changes: Any) -> None:
        self.now += seconds
        self.store.put_reading(
            dataclasses.replace(node(reading(active, *pids, **changes), taken=self.now), facts=dict(self.facts))
        )

    def report(self, pid: int, inactive: float | None, sequence: int = 1) -> None:
        sent = report(pid, sequence=sequence, inactive_seconds=inactive)
        self.store.put_report(sent, host_pid=pid, now_seconds=self.now, now_unix_seconds=1e9 + self.now)

    def last(self, pid: int) -> float | None:
        snapshot = self.store.snapshot(self.now)
        reporter = next((process for process in snapshot.processes if process.host_pid == pid), None)
        return snapshot.last_active_seconds(reporter, pid)


def reading(
    active: set[int] | None, *pids: int, utilization: float | None = None, uuid: str = UUIDS[0]
) -> DeviceReading:
    listed = device(uuid, processes=dict.fromkeys(pids, 1 << 30))
    active_pids = None if active is None else frozenset(active)
    return dataclasses.replace(listed, utilization_ratio=utilization, active_pids=active_pids)


def test_the_driver_shows_the_last_use_of_a_process_that_does_not_report() -> None:
    bench = Bench()
    bench.read({7}, 7, 8)
    first = bench.now
    bench.read(set(), 7, 8, seconds=500)
    assert (bench.last(7), bench.last(8)) == (first, first), "pid 8 has been seen since then"
    bench.read({8}, 7, 8, seconds=500)
    assert (bench.last(7), bench.last(8)) == (first, bench.now)
    bench.facts = {7: ProcessFacts(7, 1, started_seconds=bench.now)}
    bench.read(set(), 7, 8)
    assert bench.last(7) == bench.now - 1, "another process has the pid"


def test_what_the_driver_does_not_show_is_unknown() -> None:
    bench = Bench()
    bench.read(None, 7, 8, utilization=0.0)
    assert bench.last(7) is None
    bench.read(set(), 7, 8)
    bench.read(None, 7, 8, seconds=900)
    assert bench.last(7) is None
    assert bench.last(9) is None
    bench.store.put_reading(node(reading(set(), 7), reading(None, 7, 8, uuid=UUIDS[1]), taken=bench.now))
    assert bench.last(7) is None, "it may use the other device"


def test_a_process_that_is_alone_is_active_while_its_device_is() -> None:
    bench = Bench()
    bench.read(None, 7, utilization=0.0)
    bench.read(None, 7, utilization=0.2, seconds=100)
    active = bench.now
    bench.read(None, 7, utilization=0.0, seconds=100)
    assert bench.last(7) == active


def test_all_clients_of_mps_are_active_while_its_server_is() -> None:
    bench = Bench()
    bench.facts = {5: ProcessFacts(5, 1, "nvidia-cuda-mps-server")}
    bench.read({5}, 5, 7)
    bench.read({5}, 5, 7, seconds=100)
    assert bench.last(7) == bench.now


def test_a_reporter_knows_more_than_the_first_reading_and_less_than_a_use() -> None:
    bench = Bench()
    bench.read(set(), 7, 8)
    bench.report(7, 900.0)
    assert bench.last(7) == bench.now - 900
    bench.read({7}, 7, 8)
    assert bench.last(7) == bench.now, "a CUDA graph allocates nothing"
    bench.report(7, None, sequence=2)
    assert bench.last(7) == bench.now
    bench.report(9, 5.0)
    assert bench.last(9) == bench.now - 5


def test_the_time_on_the_way_does_not_change_the_last_activity() -> None:
    bench = Bench()
    bench.report(7, 100.0)
    first = bench.last(7)
    for sequence, late in enumerate((0.0, 0.7, 0.2), start=2):
        bench.now += 1
        bench.report(7, 100.0 + sequence - 1 - late, sequence)
        assert bench.last(7) == first
    bench.now += 1
    bench.report(7, 0.0, 5)
    assert bench.last(7) == bench.now
