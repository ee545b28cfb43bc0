"""Readings and reports that belong together, through the store."""

from __future__ import annotations

from typing import Any

import pytest

from gpumem_exporter.core.ledger import node_ledgers, node_shares
from gpumem_exporter.core.store import Store
from tests.support.builders.builders import UUIDS, device, node, report, sample

CONTEXT, TOTAL = 500, 100_000


class Node:
    """One device, its processes, and a store; each call takes place half a second after the one before."""

    def __init__(self, *pids: int) -> None:
        self.store = Store(report_expiry_seconds=60.0, reading_expiry_seconds=5.0, max_processes=8)
        self.now = 0.0
        self.non_torch = dict.fromkeys(pids, CONTEXT)
        self.reserved = dict.fromkeys(pids, 1000)
        self.sequence = 0

    def poll(self) -> None:
        self.now += 0.5
        used = {pid: self.reserved[pid] + self.non_torch[pid] for pid in self.reserved}
        reading = device(total=TOTAL, used=sum(used.values()), processes=dict(used))
        self.store.put_reading(node(reading, taken=self.now))

    def report(self, pid: int = 1, **changes: Any) -> None:
        self.now += 0.5
        self.sequence += 1
        devices = (sample(allocated=self.reserved[pid]),)
        sent = report(pid, devices=devices, sequence=self.sequence, **changes)
        self.store.put_report(sent, host_pid=pid, now_seconds=self.now, now_unix_seconds=self.now)

    def settle(self) -> None:
        for pid in self.reserved:
            self.report(pid)
        self.poll()
        for pid in [*self.reserved, *self.reserved]:
            self.report(pid)

    def shown(self, pid: int = 1) -> tuple[int | None, int | None]:
        """Return reserved and non-torch bytes of a process; every snapshot adds up."""
        snapshot = self.store.snapshot(self.now)
        for ledger in node_ledgers(snapshot).values():
            assert sum(ledger.categories.values()) == TOTAL
        (share,) = [share for share in node_shares(snapshot)[UUIDS[0]] if share.pid == str(pid)]
        reported = {process.host_pid: process.report.devices[0] for process in snapshot.processes}
        assert share.sample is reported[pid]
        return reported[pid].reserved_bytes, share.non_torch_bytes


def test_a_new_process_shows_its_non_torch_memory_once_a_reading_lies_between_equal_samples() -> None:
    one = Node(1)
    one.report()
    one.reserved[1] = 5000  # between the report and the reading
    one.poll()
    assert one.shown() == (1000, None)
    one.report()
    one.poll()
    one.report()
    assert one.shown() == (5000, None)
    one.report()
    assert one.shown() == (5000, CONTEXT)


def test_a_change_of_reserved_memory_moves_reading_and_report_together() -> None:
    one = Node(1)
    one.settle()
    one.reserved[1] = 200
    one.report()
    assert one.shown() == (1000, CONTEXT)
    one.poll()
    assert one.shown() == (200, CONTEXT)
    one.reserved[1] = 3000
    one.poll()
    assert one.shown() == (200, CONTEXT)
    one.report()
    assert one.shown() == (3000, CONTEXT)


def test_the_readings_of_a_device_fit_to_all_its_processes() -> None:
    two = Node(1, 2)
    two.settle()
    two.reserved |= {1: 100, 2: 4000}
    two.poll()
    two.report(1)
    assert (two.shown(1), two.shown(2)) == ((1000, CONTEXT), (1000, CONTEXT))
    two.report(2)
    assert (two.shown(1), two.shown(2)) == ((100, CONTEXT), (4000, CONTEXT))


def test_a_process_that_fits_to_no_reading_does_not_delay_the_others() -> None:
    two = Node(1, 2)
    two.settle()
    for step in range(20):
        two.reserved[1] += 10 if step % 2 else -7
        two.report(1)
        two.reserved[1] += 3
        two.poll()
        assert two.shown(1)[1] in (CONTEXT, None)
    assert two.shown(1)[1] is None
    assert two.shown(1)[0] != 1000, "the older reading has expired"
    two.reserved[2] = 5000
    two.report(2)
    two.poll()
    assert two.shown(2) == (5000, CONTEXT)


@pytest.mark.parametrize("interval_seconds", [15, 60])
def test_a_rise_is_shown_within_five_seconds_however_rarely_the_driver_is_polled(interval_seconds: int) -> None:
    one = Node(1)
    one.store = Store(report_expiry_seconds=60.0, reading_expiry_seconds=3.0 * interval_seconds, max_processes=8)
    one.settle()
    reserved = {one.now: one.reserved[1]}
    for step in range(8 * interval_seconds):
        one.reserved[1] += 10
        one.report()
        reserved[one.now] = one.reserved[1]
        if step % (2 * interval_seconds) == 0:
            one.poll()
        shown_bytes = one.shown()[0]
        (shown_seconds,) = [seconds for seconds, value in reserved.items() if value == shown_bytes]
        assert one.now - shown_seconds <= 6.0


def test_a_sample_from_before_the_reading_proves_nothing() -> None:
    one = Node(1)
    one.report()
    one.reserved[1] = 5000
    one.poll()
    for _ in range(2):  # the reporter repeats the sample of its last step
        one.reserved[1] = 1000
        one.report(sample_age_seconds=one.now)
        one.reserved[1] = 5000
    assert one.shown() == (1000, None)


def test_memory_that_the_driver_does_not_hold_is_unmapped() -> None:
    one = Node(1)
    one.settle()
    one.non_torch[1] = CONTEXT - 800  # the pages of tensors are released, and PyTorch does not count that
    for _ in range(2):
        one.poll()
        assert one.shown() == (1000, CONTEXT)
        one.report()
    assert one.shown() == (200, CONTEXT)
    (process,) = one.store.snapshot(one.now).processes
    assert process.report.devices[0].unmapped_bytes == 800
    one.non_torch[1] = CONTEXT
    for _ in range(2):
        one.poll()
        assert one.shown() == (200, CONTEXT)
        one.report()
    assert one.shown() == (1000, CONTEXT)
