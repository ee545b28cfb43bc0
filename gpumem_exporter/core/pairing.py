"""Pairs the driver's readings with the reports of processes, so that their difference is true: the non-torch memory.

Driver and processes are read at different times. The difference of a reading and a report is the non-torch memory only
if the process' reserved memory was the same at both times. Two facts show that:

- The reading lies between two samples of the process, and its allocator took and released nothing between them.
- The difference has the value that such a reading has shown before.

A device therefore keeps an older reading and older samples in use until a newer reading fits the samples of all
processes on it, for at most `MAX_WAIT_SECONDS`. Then the newest values are used as they are, and the non-torch memory
of the processes that do not fit is unknown. It is also unknown for a new process until it is known once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter, is_

from gpumem_client.wire.protocol import DeviceSample
from gpumem_exporter.core.readings import DeviceReading, NodeReading
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess, giving_way

MAX_WAIT_SECONDS = 5.0
"""The longest time for which a sample or a reading is kept in use after a newer one has arrived.

It does not depend on the interval of the polls: the rise before an out-of-memory error must be visible at any interval.
"""
_NEVER = float("-inf")

# Equal in two samples if the allocator took nothing from the driver and released nothing between them.
_heap_version = attrgetter("reserved_bytes", "segments_allocated", "segments_freed", "cache_flushes", "alloc_retries")


@dataclass(frozen=True, slots=True, eq=False)
class _Reading:
    """One device in one poll."""

    node: NodeReading
    device: DeviceReading
    used: dict[int, int | None]
    """The driver's bytes of each process, by host pid."""

    @property
    def ended_seconds(self) -> float:
        return self.node.taken_seconds

    @property
    def started_seconds(self) -> float:
        return self.node.taken_seconds - self.node.duration_seconds

    def used_by(self, process: ReportingProcess) -> int | None:
        """Return the driver's bytes of a process; None if unknown, and if another process had its pid."""
        used = None if process.host_pid is None else self.used.get(process.host_pid)
        return used if used is not None and self.node.pid_belongs_to(process) else None


@dataclass(slots=True)
class _Row:
    """One process on one device."""

    process: ReportingProcess
    newest: DeviceSample
    unchanged_from: float
    """The first of the samples that are equal to the newest one was taken before this time…"""
    shown: DeviceSample
    shown_seconds: float
    """When it was sampled."""
    unchanged_until: float = _NEVER
    """…and the newest one after this time."""
    non_torch_bytes: int | None = None
    """The last known difference of the driver's bytes and the reserved ones."""
    positive_bytes: int = 0
    """Its last value that was not negative."""
    fits: bool = False
    """`shown` belongs to the reading that the device shows."""
    waits_from: float | None = None
    """When the first report arrived that is newer than `shown`; None if `shown` is the newest sample."""

    def continues_in(self, process: ReportingProcess) -> bool:
        """Whether a report is of the same session."""
        sessions = (each.report.process.session for each in (self.process, process))
        return len(set(sessions)) == 1 and self.process.host_pid == process.host_pid

    def take(self, sample: DeviceSample, process: ReportingProcess) -> None:
        """Take the sample of a new report."""
        if _heap_version(sample) == _heap_version(self.newest):
            # The reporter creates a report after the exporter has received the one before: the new sample is older than
            # that moment by its age at most.
            self.unchanged_until = self.process.received_seconds - process.report.sample_age_seconds
        else:
            self.unchanged_from, self.unchanged_until = process.sampled_seconds, _NEVER
        self.process, self.newest = process, sample

    def unchanged_at(self, reading: _Reading) -> bool:
        """Whether the process is known to have reserved the same memory throughout the reading."""
        return self.unchanged_from < reading.started_seconds and reading.ended_seconds < self.unchanged_until

    def belongs_to(self, reading: _Reading) -> bool:
        """Whether the newest sample and the reading are known to belong together."""
        difference = self.difference(reading)
        return difference is None or difference == self.non_torch_bytes or self.unchanged_at(reading)

    def may_show(self, reading: _Reading) -> bool:
        """Whether the non-torch memory stays known with this reading, or is unknown anyway."""
        return not self.fits or self.non_torch_bytes is None or self.belongs_to(reading)

    def has_waited(self) -> bool:
        """Whether the newest sample has waited long enough for a reading that fits. The first call starts the wait."""
        now_seconds = self.process.received_seconds
        if self.waits_from is None:
            self.waits_from = now_seconds
        return now_seconds - self.waits_from >= MAX_WAIT_SECONDS

    def difference(self, reading: _Reading) -> int | None:
        """Return the driver's bytes minus the reserved ones; None if either is unknown."""
        used, reserved = reading.used_by(self.process), self.newest.reserved_bytes
        return None if used is None or reserved is None else used - reserved

    def show(self, reading: _Reading) -> None:
        """Use the newest sample with this reading."""
        # Also if the sample does not fit: then only the non-torch memory is unknown.
        self.shown, self.shown_seconds, self.waits_from = self.newest, self.process.sampled_seconds, None
        self.fits = self.belongs_to(reading)
        if self.fits:
            self.non_torch_bytes = self.difference(reading)
            self._show_unmapped()

    def _show_unmapped(self) -> None:
        """Show memory that the driver does not hold as unmapped: it holds less than the process reserved.

        The process has released pages of its tensors and cannot say so. Its last known non-torch memory is still there.
        """
        if self.non_torch_bytes is None or self.non_torch_bytes >= 0:
            self.positive_bytes = self.non_torch_bytes or 0
            return
        sample, missing = self.newest, self.positive_bytes - self.non_torch_bytes
        reserved = max(0, (sample.reserved_bytes or 0) - missing)
        allocated = None if sample.allocated_bytes is None else max(0, sample.allocated_bytes - missing)
        cached = (
            None if sample.reclaimable_bytes is None else min(sample.reclaimable_bytes, reserved - (allocated or 0))
        )
        self.shown = replace(
            sample,
            reserved_bytes=reserved,
            allocated_bytes=allocated,
            reclaimable_bytes=cached,
            unmapped_bytes=(sample.unmapped_bytes or 0) + missing,
        )


@dataclass(slots=True)
class _Device:
    """One device: its readings, oldest first, and the processes that report about it."""

    readings: deque[_Reading] = field(default_factory=deque)
    shown: _Reading | None = None
    rows: dict[ProcessKey, _Row] = field(default_factory=dict)

    def take(self, reading: _Reading) -> None:
        """Take a new reading."""
        oldest_seconds = reading.ended_seconds - MAX_WAIT_SECONDS
        while self.readings and self.readings[0].ended_seconds < oldest_seconds:
            self.readings.popleft()
        self.readings.append(reading)
        shown = self.shown
        # The shown reading has expired, or one of the two has no values that could be compared.
        if shown is None or shown not in self.readings or None in (shown.device.memory, reading.device.memory):
            self._show(reading)
        else:
            self._show_newest(self.rows.values())

    def show_after_report(self, row: _Row) -> bool:
        """After a report, show the newest reading that fits all processes, otherwise the new sample if that fits.

        Returns whether the device shows another reading.
        """
        if self.shown is None:
            return False
        if self._show_newest((row, *self.rows.values())):
            return True
        if not row.fits or row.belongs_to(self.shown) or row.has_waited():
            row.show(self.shown)
        return False

    def learn(self, row: _Row) -> None:
        """Learn the non-torch memory of a process from the last reading between two equal samples."""
        for reading in reversed(self.readings):
            if row.unchanged_at(reading) and (difference := row.difference(reading)) is not None:
                row.non_torch_bytes = difference
                return
            if row.fits and reading is self.shown:
                return

    def _show_newest(self, rows: Iterable[_Row]) -> bool:
        """Show the newest reading that fits these rows; returns False if the shown one remains."""
        for reading in reversed(self.readings):
            if reading is self.shown:
                break
            if all(row.may_show(reading) for row in rows):
                self._show(reading)
                return True
        return False

    def _show(self, reading: _Reading) -> None:
        self.shown = reading
        for row in self.rows.values():
            row.show(reading)


class Pairing:
    """The readings and samples that belong together. Not thread-safe."""

    def __init__(self) -> None:
        # Each call leaves `node` and `processes` up to date, so that a snapshot only reads them. The rows know already
        # what they show. To pair a process takes 2 us in its report, as it would in the next snapshot. A device shows
        # another reading at most once for each poll; then its processes are paired again, 64 on 8 devices in 1 to 2 ms.
        self.node: NodeReading | None = None
        """The newest reading. Each device has the memory values of the reading that fits the reports."""
        self.processes: dict[ProcessKey, ReportingProcess] = {}
        """Each process has the samples that fit the readings, and the age of the oldest of them."""
        self._devices: dict[str, _Device] = {}

    def put_reading(self, node: NodeReading, processes: Iterable[ReportingProcess]) -> None:
        """Take a reading of the driver; `processes` are all processes with their last reports."""
        listed = {device.uuid for device in node.devices}
        self._devices = {
            uuid: device if uuid in listed else _Device(rows=device.rows)
            for uuid, device in self._devices.items()
            if uuid in listed or device.rows
        }
        for device in node.devices:
            used = {process.pid: process.used_bytes for process in device.processes or ()}
            self._device(device.uuid).take(_Reading(node, device, used))
        self._show_devices(node)
        self.processes = {process.key: self._pair(process) for process in giving_way(processes)}

    def put_report(self, process: ReportingProcess) -> None:
        """Take a report."""
        reported = {sample.uuid: sample for sample in process.report.devices}
        self._remove_rows(process.key, except_devices=reported)
        changed = {process.key: process}
        shows_another = False
        for uuid, sample in reported.items():
            device = self._device(uuid)
            row = device.rows.get(process.key)
            if row is None or not row.continues_in(process):
                row = device.rows[process.key] = _Row(
                    process, sample, process.sampled_seconds, sample, process.sampled_seconds
                )
            else:
                row.take(sample, process)
                device.learn(row)
            if device.show_after_report(row):
                shows_another = True
                changed |= {key: other.process for key, other in device.rows.items()}
        if shows_another and self.node is not None:
            self._show_devices(self.node)
        for key, each in changed.items():
            self.processes[key] = self._pair(each)

    def forget(self, key: ProcessKey) -> None:
        """Forget a process."""
        self.processes.pop(key, None)
        self._remove_rows(key)

    def _remove_rows(self, key: ProcessKey, except_devices: Container[str] = ()) -> None:
        for uuid, device in self._devices.items():
            if uuid not in except_devices:
                device.rows.pop(key, None)

    def _show_devices(self, node: NodeReading) -> None:
        devices = tuple([self._shown_device(device) for device in node.devices])
        self.node = node if all(map(is_, devices, node.devices)) else replace(node, devices=devices)

    def _pair(self, process: ReportingProcess) -> ReportingProcess:
        report = process.report
        rows = [self._shown_row(process.key, sample) for sample in report.devices]
        if all(row and row.fits and row.shown is row.newest for row in rows):
            return process
        samples = tuple([row.shown if row else sample for row, sample in zip(rows, report.devices, strict=True)])
        unmatched = frozenset(sample.uuid for row, sample in zip(rows, samples, strict=True) if not row or not row.fits)
        if all(map(is_, samples, report.devices)):
            return replace(process, unmatched=unmatched)
        oldest_seconds = min(row.shown_seconds for row in rows if row)
        age_seconds = max(report.sample_age_seconds, process.received_seconds - oldest_seconds)
        shown = replace(report, devices=samples, sample_age_seconds=age_seconds)
        return replace(process, report=shown, unmatched=unmatched)

    def _device(self, uuid: str) -> _Device:
        device = self._devices.get(uuid)
        if device is None:
            device = self._devices[uuid] = _Device()
        return device

    def _shown_device(self, newest: DeviceReading) -> DeviceReading:
        device = self._devices.get(newest.uuid)
        if device is None or device.shown is None or newest.memory is None or device.shown.device is newest:
            return newest
        shown = device.shown.device
        return replace(newest, memory=shown.memory, processes=shown.processes)

    def _shown_row(self, key: ProcessKey, sample: DeviceSample) -> _Row | None:
        device = self._devices.get(sample.uuid)
        return device.rows.get(key) if device is not None and device.shown is not None else None
