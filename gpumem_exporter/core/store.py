"""The store of the last driver reading and of each process' last report.

The poller and the report route write to it; readers take a snapshot. The store is thread-safe: the poller writes from
its thread, everything else from the event loop. No method does I/O.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from dataclasses import replace

from gpumem_exporter.core.last_ooms import LastOoms
from gpumem_exporter.core.samples import LastOom, NodeReading, ProcessKey, ReportingProcess, SilentReporter, Snapshot
from gpumem_exporter.errors import ReporterSupersededError, TooManyProcessesError, UnknownDeviceError
from gpumem_exporter.wire.protocol import ProcessIdentity, Report

__all__ = ["Store"]


class Store:
    """The last reading of the driver and the last report of each process.

    Args:
        report_expiry_seconds: the age at which a report expires; its process then counts as silent.
        reading_expiry_seconds: the age at which a reading of the driver expires.
        max_processes: the maximum number of reporters, without silent ones.
    """

    def __init__(self, *, report_expiry_seconds: float, reading_expiry_seconds: float, max_processes: int) -> None:
        self.report_expiry_seconds = report_expiry_seconds
        self.reading_expiry_seconds = reading_expiry_seconds
        self.max_processes = max_processes
        self._lock = threading.Lock()
        self._node: NodeReading | None = None
        self._processes: dict[ProcessKey, ReportingProcess] = {}
        self._silent: dict[ProcessKey, SilentReporter] = {}
        self._ooms = LastOoms()

    def put_reading(self, reading: NodeReading) -> None:
        """Store a reading of the driver; called by the poller's thread."""
        with self._lock:
            self._node = reading

    def put_report(
        self,
        report: Report,
        *,
        host_pid: int | None,
        now_seconds: float,
        now_unix_seconds: float,
        owner_uid: int | None = None,
    ) -> ReportingProcess:
        """Store a report and return its process.

        A report older than the stored one of the same session changes nothing. Samples of devices that the driver does
        not have are dropped, because they belong to no ledger.

        Raises:
            ReporterSupersededError: a later session represents this process.
            TooManyProcessesError: `max_processes` is reached.
            UnknownDeviceError: the driver is up and has none of the devices in the report.
        """
        identity = report.process
        key = ProcessKey(identity.pid_namespace, identity.pid, owner_uid)
        with self._lock:
            self._expire(now_seconds)
            report = self._without_unknown_devices(report)
            known = self._processes.get(key)
            if known is None:
                if len(self._processes) >= self.max_processes:
                    raise TooManyProcessesError(
                        f"{len(self._processes)} processes report already; raise --report.max-processes to accept more"
                    )
            elif known.report.process.session == identity.session:
                if report.sequence <= known.report.sequence:
                    return known
            elif _seniority(identity) < _seniority(known.report.process):
                raise ReporterSupersededError(f"a newer reporter represents pid {identity.pid}")
            process = ReportingProcess(key, host_pid, report, now_seconds, now_unix_seconds)
            self._processes[key] = process
            self._silent.pop(key, None)
            return process

    def put_ooms(self, ooms: Iterable[LastOom]) -> None:
        """Store new out-of-memory errors, which stay in snapshots for an hour, also after their processes exit."""
        with self._lock:
            self._ooms.put(ooms)

    def restore_ooms(self, ooms: Iterable[LastOom]) -> None:
        """Restore the out-of-memory errors that an earlier run of the exporter stored."""
        with self._lock:
            self._ooms.restore(ooms)

    def forget(self, key: ProcessKey) -> None:
        """Remove a process that exited or stopped its reporter; an unknown key is ignored."""
        with self._lock:
            self._processes.pop(key, None)
            self._silent.pop(key, None)

    def snapshot(self, now_seconds: float) -> Snapshot:
        """Return the current state without expired data."""
        with self._lock:
            self._expire(now_seconds)
            return Snapshot(
                taken_seconds=now_seconds,
                node=self._valid_node(now_seconds),
                processes=tuple(self._processes.values()),
                silent=tuple(self._silent.values()),
                ooms=self._ooms.at(now_seconds),
            )

    def find(self, key: ProcessKey) -> ReportingProcess | None:
        """Return the process with its last report, whatever the age of the report; None if unknown."""
        return self._processes.get(key)

    def _valid_node(self, now_seconds: float) -> NodeReading | None:
        node = self._node
        if node is None or now_seconds - node.taken_seconds > self.reading_expiry_seconds:
            return None
        return node

    def _expire(self, now_seconds: float) -> None:
        oldest_seconds = now_seconds - self.report_expiry_seconds
        for process in [process for process in self._processes.values() if process.received_seconds < oldest_seconds]:
            del self._processes[process.key]
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

    def _without_unknown_devices(self, report: Report) -> Report:
        node = self._node
        if node is None or not node.up:
            return report
        known = {device.uuid for device in node.devices}
        if "" in known:
            return report  # the report may be about a device that was lost before its uuid was read
        devices = tuple(sample for sample in report.devices if sample.uuid in known)
        if len(devices) == len(report.devices):
            return report
        if not devices:
            raise UnknownDeviceError(f"the driver has no device {report.devices[0].uuid!r}")
        return replace(report, devices=devices)


def _seniority(identity: ProcessIdentity) -> tuple[int, float]:
    """Return a sort key for two sessions of one pid: the later process comes last, then the later reporter."""
    return (identity.start_time_ticks, identity.session_started_seconds)
