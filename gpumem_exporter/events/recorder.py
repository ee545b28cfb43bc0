"""Convert reports, readings and actions to events and queue them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from gpumem_exporter.actions.model import Action, SubmittedAction
from gpumem_exporter.core.samples import NodeReading, ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.events.actions import action_event, requested_event
from gpumem_exporter.events.devices import DeviceHistory
from gpumem_exporter.events.log import EventLog
from gpumem_exporter.events.model import Event
from gpumem_exporter.events.ooms import OomDeduplicator
from gpumem_exporter.events.processes import ProcessHistory


class Recorder:
    """Converts reports, readings and actions to events and queues them. No method waits for the disk.

    The event loop calls all methods except `take_reading`, which the poller's thread calls. `on_ooms` receives each new
    out-of-memory error, even if it cannot be stored, and `on_left_out` the number of events beyond the limits of their
    process or user.
    """

    def __init__(
        self,
        log: EventLog,
        *,
        report_expiry_seconds: float,
        reading_expiry_seconds: float,
        wall_clock: Callable[[], float],
        on_ooms: Callable[[Sequence[Event]], None],
        on_left_out: Callable[[int], None] = lambda _: None,
    ) -> None:
        self.log = log
        self._silent_reason = f"no report for {report_expiry_seconds:g} s"
        self._wall_clock = wall_clock
        self._on_ooms = on_ooms
        self._on_left_out = on_left_out
        self._processes = ProcessHistory(reading_expiry_seconds=reading_expiry_seconds, on_left_out=on_left_out)
        self._ooms = OomDeduplicator()
        self._devices = DeviceHistory()
        self._uncommitted: dict[str, Future[bool]] = {}
        """By session, the errors that are not committed; a report that repeats them must not be acknowledged before."""

    def take_report(self, process: ReportingProcess) -> Future[bool] | None:
        """Record an accepted report.

        The future is true once the report's out-of-memory errors are committed; None if there is nothing to wait for.
        """
        self._put(self._processes.take_report(process))
        if not process.report.ooms:
            return None
        session = process.report.process.session
        self._uncommitted = {session: future for session, future in self._uncommitted.items() if not future.done()}
        now = self._wall_clock()
        events = self._ooms.new_events(process, self._processes.gpus, now)
        if events:
            self._on_ooms(events)  # before `put`, so that a client that reads the event finds its series
            stored = self._ooms.within_limit(process.key, events, now)
            self._on_left_out(len(events) - len(stored))
            if stored:
                self._uncommitted[session] = self.log.put(stored)
        return self._uncommitted.get(session)

    def take_reading(self, reading: NodeReading) -> None:
        """Record a reading of the driver."""
        if reading.up:
            self._processes.take_reading(reading)
            self._put(self._devices.take_reading(reading))

    def processes_ended(self, ended: Iterable[tuple[ProcessKey, str]]) -> None:
        """Record that processes are removed from the store, each with the reason; unknown processes are ignored."""
        self._put(self._processes.remove(ended, self._wall_clock()))

    def running(self, job_id: str) -> list[Event]:
        """Return an event for each reporting process of a job, as if the process ended now."""
        return self._processes.running(job_id, self._wall_clock())

    def sweep(self, snapshot: Snapshot) -> None:
        """Record the end of processes that are no longer in the snapshot, because their reports expired.

        Called once a second.
        """
        reporting = {process.key for process in snapshot.processes}
        silent = sorted(self._processes.keys() - reporting, key=lambda key: key[:2])  # an owner may be None
        self._put(self._processes.remove([(key, self._silent_reason) for key in silent], self._wall_clock()))

    def action_requested(self, submitted: SubmittedAction) -> Future[bool]:
        """Record a requested action; the future is true once the event is committed."""
        return self.log.put([requested_event(submitted)])

    def action_finished(self, action: Action) -> Future[bool] | None:
        """Record a finished action; the future is true once the event is committed. A dry run has no event."""
        return None if action.dry_run else self.log.put([action_event(action, self._wall_clock())])

    def _put(self, events: Iterable[Event]) -> None:
        for event in events:
            self.log.put((event,))
