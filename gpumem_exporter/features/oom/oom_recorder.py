"""Records out-of-memory errors: as events, as log lines, and as the last errors that snapshots show."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from gpumem_client.wire.errors import StorageError
from gpumem_exporter.core.event import Event, Query, oom_subject, process_subject
from gpumem_exporter.core.recorders import ErrorRecorder, Journal
from gpumem_exporter.core.samples import LastOom, ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.core.store import Store
from gpumem_exporter.features.oom.last_ooms import MAX_SHOWN, SHOWN_SECONDS, LastOoms
from gpumem_exporter.features.oom.oom_events import OomDeduplicator, last_ooms

# For a report of an older error, the node has changed since.
_NEAR_SECONDS = 5.0
# The last errors of a process among which an error before a restart of the exporter is found.
_MAX_ERRORS = 100

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class OomRecorder(ErrorRecorder):
    """Records the out-of-memory errors of reports. Used on the event loop only; no method waits for the disk."""

    journal: Journal
    store: Store
    _: KW_ONLY
    clock: Callable[[], float]
    wall_clock: Callable[[], float]
    gpu_of: Callable[[str], str | None]
    """Returns the NVML index of a device."""
    job_of: Callable[[ReportingProcess], str]
    """Returns the id of a process' job."""
    device_of: Callable[[str, str], Mapping[str, Any] | None] = lambda _, __: None
    """Returns who uses a device beside a process."""
    last: LastOoms = field(default_factory=LastOoms)
    """The last errors, for snapshots."""
    _known: OomDeduplicator = field(default_factory=OomDeduplicator)
    _uncommitted: dict[str, Future[bool]] = field(default_factory=dict)
    """By session, the errors that are not committed; a report that repeats them must not be acknowledged before."""

    def take_report(self, process: ReportingProcess) -> Future[bool] | None:
        """Record the errors of an accepted report, or of the report of a process that has exited.

        The future is true once they are committed; None if there is nothing to wait for.
        """
        if not process.report.ooms:
            return None
        session = process.report.process.session
        self._uncommitted = {session: future for session, future in self._uncommitted.items() if not future.done()}
        now = self.wall_clock()
        events = self._known.new_events(process, self.gpu_of, now)
        if events:
            # Before `put`, so that a client that reads the event finds its series.
            self.last.put(last_ooms(events, self.clock(), now))
            stored = self._known.within_limit(process.key, events, now)
            self.journal.count_left_out(len(events) - len(stored))
            job = self.job_of(process)
            for event in stored:
                complete = replace(event, job=job, detail=self._with_device(event, now))
                self._uncommitted[session] = self.journal.put(complete)  # committed after the errors before it
        return self._uncommitted.get(session)

    def _with_device(self, event: Event, now_unix_seconds: float) -> Mapping[str, Any]:
        """Return the detail of an error with its device; without the other jobs there if they may have changed."""
        device = self.device_of(event.uuid, str(event.pid)) if event.uuid is not None else None
        if device is not None and now_unix_seconds - event.time_unix_seconds >= _NEAR_SECONDS:
            device = {"total_bytes": device["total_bytes"]}
        return {**event.detail, "device": device}

    def has_error(self, process: ReportingProcess, number: int) -> bool:
        """Return whether a process has reported this error to this run of the exporter."""
        return self._known.knows(process.report.process.session, number)

    async def knows_error(self, process: ReportingProcess, number: int) -> bool:
        """Return whether a process has reported this error, also to an earlier run of the exporter."""
        if self.has_error(process, number):
            return True
        try:
            page = await self.journal.page(Query(types=("oom",), pid=process.name, limit=_MAX_ERRORS))
        except StorageError:
            return False
        subject = oom_subject(process.report.process.session, number)
        return any((event.subject, event.owner) == (subject, process.key.share) for event in page.events)

    def processes_ended(self, ended: Iterable[tuple[ProcessKey, str]]) -> None:
        """Note that processes have ended, which the store still has."""
        for key, _ in ended:
            process = self.store.find(key)
            if process is not None:
                self.last.process_ended(process.report.process.session, process.received_seconds)

    async def restore(self) -> None:
        """Restore the errors of the last hour that an earlier run stored, and note which ended a process."""
        try:
            since_unix_seconds = self.wall_clock() - SHOWN_SECONDS
            query = Query(since_unix_seconds=since_unix_seconds, types=("oom",), newest_of_each=True, limit=MAX_SHOWN)
            ooms = last_ooms(await self.journal.pages(query), self.clock(), self.wall_clock())
            self.last.restore(ooms)
            without_end = [oom for oom in ooms if not await self._has_stored_end(oom)]
            # By then each process that runs has reported again.
            await asyncio.sleep(self.store.report_expiry_seconds)
            snapshot = self.store.snapshot(self.clock())
            for oom in without_end:
                if _has_ended(oom, snapshot):
                    self.last.process_ended(oom.session, oom.happened_seconds)
        except Exception:  # noqa: BLE001 - the exporter works without them
            _log.exception("the out-of-memory errors before this start cannot be restored")

    async def _has_stored_end(self, oom: LastOom) -> bool:
        """Return whether the end of an error's process is stored, and note it."""
        query = Query(types=("process_ended",), subject=process_subject(oom.session))
        for event in await self.journal.pages(query):
            last: float | None = event.detail["last_report_unix_seconds"]
            passed_seconds = 0.0 if last is None else last - oom.happened_unix_seconds
            self.last.process_ended(oom.session, oom.happened_seconds + passed_seconds)
            return True
        return False


def _has_ended(oom: LastOom, snapshot: Snapshot) -> bool:
    """Return whether an error's process neither reports nor is listed by the driver. False if that is not known."""
    node = snapshot.node
    if any(process.report.process.session == oom.session for process in snapshot.processes):
        return False
    if node is None or not node.up or not oom.pid.isdecimal():
        return False
    if any(device.processes is None for device in node.devices):
        return False
    if not any(listed.pid == int(oom.pid) for device in node.devices for listed in device.processes or ()):
        return True
    facts = node.facts.get(int(oom.pid))
    started_seconds = facts.started_seconds if facts is not None else None
    return started_seconds is not None and started_seconds > oom.happened_seconds  # the pid was reused
