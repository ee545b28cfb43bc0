"""A recorder of events and a store, with clocks that only the test advances."""

from __future__ import annotations

import dataclasses
from concurrent.futures import Future
from typing import Any

from gpumem_client.wire.protocol import OutOfMemory
from gpumem_exporter.core.event import Event
from gpumem_exporter.core.readings import DeviceReading
from gpumem_exporter.core.recorders import Journal
from gpumem_exporter.core.samples import ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.events.event_recorder import Recorder
from gpumem_exporter.features.oom.oom_recorder import OomRecorder
from tests.support.builders.builders import UUIDS, node, report


def oom(number: int = 1, uuid: str = UUIDS[0], **changes: Any) -> OutOfMemory:
    return OutOfMemory(**{"uuid": uuid, "number": number, **changes})


class RecordedLog(Journal):
    """Replaces the event log: stores events in a list, and lets the test complete the futures."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.futures: list[Future[bool]] = []
        self.left_out: list[int] = []

    def put(self, event: Event) -> Future[bool]:
        self.events.append(event)
        self.futures.append(Future())
        return self.futures[-1]

    def count_left_out(self, count: int) -> None:
        self.left_out.append(count)

    def of(self, *types: str) -> list[Event]:
        return [event for event in self.events if event.type in types]


class RecorderBench:
    """Accepts reports and readings, as the exporter does."""

    def __init__(self, reading_expiry_seconds: float = 5.0) -> None:
        self.now = 100.0
        self.unix = 1.7e9
        self.log = RecordedLog()
        self.store = Store(report_expiry_seconds=15, reading_expiry_seconds=reading_expiry_seconds, max_processes=2000)
        self.recorder = Recorder(self.log, self.store, wall_clock=lambda: self.unix)
        self.ooms = OomRecorder(
            self.log,
            self.store,
            clock=lambda: self.now,
            wall_clock=lambda: self.unix,
            gpu_of=self.recorder.gpu_of,
            job_of=lambda process: f"{process.report.process.workload}~1",
        )

    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.unix += seconds

    def snapshot(self) -> Snapshot:
        return self.store.snapshot(self.now, ooms=self.ooms.last.at(self.now))

    def report(
        self,
        pid: int = 7,
        *ooms: OutOfMemory,
        host_pid: int | None = None,
        owner_uid: int | None = None,
        **changes: Any,
    ) -> Future[bool] | None:
        sent = report(pid, ooms=ooms, **changes)
        process = self.store.put_report(
            sent, host_pid=host_pid, owner_uid=owner_uid, now_seconds=self.now, now_unix_seconds=self.unix
        )
        process = dataclasses.replace(process, report=sent)
        self.recorder.take_report(process)
        return self.ooms.take_report(process)

    def reading(self, *devices: DeviceReading, **changes: Any) -> None:
        reading = dataclasses.replace(node(*devices, taken=self.now), **changes)
        self.store.put_reading(reading)
        self.recorder.take_reading(reading)

    def sweep(self) -> None:
        self.recorder.sweep(self.store.snapshot(self.now))

    def forget(self, process: ReportingProcess, reason: str) -> None:
        self.ooms.processes_ended([(process.key, reason)])
        self.recorder.processes_ended([(process.key, reason)])
        self.store.forget(process.key)

    def process(self) -> ReportingProcess:
        (process,) = self.store.snapshot(self.now).processes
        return process

    def types(self) -> list[str]:
        return [event.type for event in self.log.events]
