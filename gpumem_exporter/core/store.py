"""The one place where what is known is kept. Two write to it, the poller and the report route; readers take a snapshot.

Thread-safe: the poller writes from its thread, everything else from the event loop. No method blocks or does I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import dataclass, replace

from gpumem_exporter.core.last_ooms import LastOoms
from gpumem_exporter.core.samples import LastOom, NodeReading, ProcessKey, ReportingProcess, SilentReporter, Snapshot
from gpumem_exporter.errors import ReporterSupersededError, TooManyProcessesError, UnknownDeviceError
from gpumem_exporter.wire.protocol import ProcessIdentity, Report

__all__ = ["Store"]


@dataclass(frozen=True, slots=True)
class _Entry:
    process: ReportingProcess
    newest_sequence: int


class Store:
    """What the driver last said and what each process last reported.

    Args:
        report_expiry_seconds: a reporter silent for longer is no longer believed; its series go.
        reading_expiry_seconds: a poll older than this is no longer shown.
        max_processes: how many reporters are kept at most, silent ones not counted.
    """

    def __init__(self, *, report_expiry_seconds: float, reading_expiry_seconds: float, max_processes: int) -> None:
        self.report_expiry_seconds = report_expiry_seconds
        self.reading_expiry_seconds = reading_expiry_seconds
        self.max_processes = max_processes
        self._lock = threading.Lock()
        self._node: NodeReading | None = None
        self._entries: dict[ProcessKey, _Entry] = {}
        self._silent: dict[ProcessKey, SilentReporter] = {}
        self._ooms = LastOoms()

    def put_reading(self, reading: NodeReading) -> None:
        """Take a poll of the driver; called by the poller's thread."""
        with self._lock:
            self._node = reading

    def put_report(
        self, report: Report, *, host_pid: int | None, now_seconds: float, now_unix_seconds: float
    ) -> ReportingProcess:
        """Take a report and return the process as it is now known.

        A report that was overtaken by a newer one of the same session changes nothing. Of devices that the driver does
        not have nothing is taken: their memory belongs to no ledger.

        Raises:
            ReporterSupersededError: a later session speaks for this process.
            TooManyProcessesError: there is no room for another process.
            UnknownDeviceError: the driver is up and has none of its devices.
        """
        identity = report.process
        key = ProcessKey(identity.pid_namespace, identity.pid)
        with self._lock:
            self._expire(now_seconds)
            report = self._of_known_devices(report)
            entry = self._entries.get(key)
            if entry is None:
                if len(self._entries) >= self.max_processes:
                    raise TooManyProcessesError(
                        f"{len(self._entries)} processes report already; raise --report.max-processes to take more"
                    )
            elif entry.process.report.process.session == identity.session:
                if report.sequence <= entry.newest_sequence:
                    return entry.process
            elif _seniority(identity) < _seniority(entry.process.report.process):
                raise ReporterSupersededError(f"another reporter speaks for pid {identity.pid} since")
            process = ReportingProcess(key, host_pid, report, now_seconds, now_unix_seconds)
            self._entries[key] = _Entry(process, report.sequence)
            self._silent.pop(key, None)
            return process

    def put_ooms(self, ooms: Iterable[LastOom]) -> None:
        """Take out-of-memory errors as they become known: shown for an hour, whatever becomes of their processes."""
        with self._lock:
            self._ooms.put(ooms)

    def recall_ooms(self, ooms: Iterable[LastOom]) -> None:
        """Take those that were kept before the exporter was started."""
        with self._lock:
            self._ooms.recall(ooms)

    def forget(self, key: ProcessKey) -> None:
        """Drop a process that has gone, or said that it goes; unknown keys are fine."""
        with self._lock:
            self._entries.pop(key, None)
            self._silent.pop(key, None)

    def snapshot(self, now_seconds: float) -> Snapshot:
        """All that is known and still believed at this moment."""
        with self._lock:
            self._expire(now_seconds)
            node = self._node
            if node is not None and now_seconds - node.taken_seconds > self.reading_expiry_seconds:
                node = None
            return Snapshot(
                taken_seconds=now_seconds,
                node=node,
                processes=tuple(entry.process for entry in self._entries.values()),
                silent=tuple(self._silent.values()),
                ooms=self._ooms.at(now_seconds),
            )

    def find(self, key: ProcessKey) -> ReportingProcess | None:
        """The process as last reported, however old the report."""
        entry = self._entries.get(key)
        return entry.process if entry else None

    def _expire(self, now_seconds: float) -> None:
        stale = [
            entry.process
            for entry in self._entries.values()
            if now_seconds - entry.process.received_seconds > self.report_expiry_seconds
        ]
        for process in stale:
            del self._entries[process.key]
            identity = process.report.process
            self._silent[process.key] = SilentReporter(
                key=process.key,
                host_pid=process.host_pid,
                start_time_ticks=identity.start_time_ticks,
                workload=identity.workload,
                rank=identity.rank,
                last_report_unix_seconds=process.received_unix_seconds,
            )
            while len(self._silent) > self.max_processes:
                self._silent.pop(next(iter(self._silent)))

    def _of_known_devices(self, report: Report) -> Report:
        node = self._node
        if node is None or not node.up:
            return report
        known = {device.uuid for device in node.devices}
        if "" in known:
            return report  # a device that was lost before it could be named here may be the one that is meant
        devices = tuple(sample for sample in report.devices if sample.uuid in known)
        if len(devices) == len(report.devices):
            return report
        if not devices:
            raise UnknownDeviceError(f"devices.0.uuid: the driver has no device {report.devices[0].uuid!r}")
        return replace(report, devices=devices)


def _seniority(identity: ProcessIdentity) -> tuple[int, float]:
    """Of two sessions in one pid: the younger process wins, then the younger reporter."""
    return (identity.start_time_ticks, identity.session_started_seconds)
