"""Where everything that happens is told, and becomes events."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future

from gpumem_exporter.actions.model import Action, SubmittedAction
from gpumem_exporter.core.naming import Names, json_pid
from gpumem_exporter.core.samples import NodeReading, ProcessKey, ReportingProcess, Snapshot
from gpumem_exporter.events.actions import action_event, asked_event
from gpumem_exporter.events.devices import device_changes
from gpumem_exporter.events.log import EventLog
from gpumem_exporter.events.model import Event
from gpumem_exporter.events.ooms import OomIntake
from gpumem_exporter.events.processes import ProcessHistory

__all__ = ["Recorder"]


class Recorder:
    """Turns reports, readings and actions into events and has them kept; no call waits for that.

    For the event loop, but for `take_reading`, which the poller's thread calls.

    Args:
        log: where the events go.
        snapshot: all that is known now: what a process is called depends on the others.
        report_expiry_seconds: a process that is silent for longer has ended, as far as its series go.
        reading_expiry_seconds: for how long a poll of the driver is believed.
        wall_clock: seconds of the Unix epoch.
        on_ooms: told of each out-of-memory error that becomes known, whether it can be kept or not.
    """

    def __init__(
        self,
        log: EventLog,
        snapshot: Callable[[], Snapshot],
        *,
        report_expiry_seconds: float,
        reading_expiry_seconds: float,
        wall_clock: Callable[[], float],
        on_ooms: Callable[[Sequence[Event]], None],
    ) -> None:
        self.log = log
        self._silent_reason = f"no report for {report_expiry_seconds:g} s"
        self._wall_clock = wall_clock
        self._snapshot = snapshot
        self._on_ooms = on_ooms
        self._processes = ProcessHistory(self._name, reading_expiry_seconds=reading_expiry_seconds)
        self._ooms = OomIntake()
        self._reading: NodeReading | None = None
        self._told: dict[str, str] = {}
        self._unkept: dict[str, Future[bool]] = {}
        """By session, the errors that wait for the disk: one that is sent again must not be answered before."""

    def take_report(self, process: ReportingProcess) -> Future[bool] | None:
        """A report was taken.

        Returns:
            For one that tells of out-of-memory errors: what is true once they are kept; None when they are.
        """
        self._put(self._processes.take_report(process))
        if not process.report.ooms:
            return None
        session = process.report.process.session
        self._unkept = {known: kept for known, kept in self._unkept.items() if not kept.done()}
        events = self._ooms.take(process, self._name(process), self._processes.gpus(), self._wall_clock())
        if events:
            self._on_ooms(events)  # first: whoever reads the event finds its series
            self._unkept[session] = self.log.put(events)
        return self._unkept.get(session)

    def take_reading(self, reading: NodeReading) -> None:
        """The driver was polled."""
        self._processes.take_reading(reading)
        if not reading.up:
            return
        changes = [
            event for event in device_changes(self._reading, reading) if self._told.get(event.subject) != event.type
        ]
        self._reading = reading
        present = {f"device:{device.uuid}" for device in reading.devices}
        self._told = {subject: type_ for subject, type_ in self._told.items() if subject in present}
        self._told.update({event.subject: event.type for event in changes})
        self._put(changes)

    def process_gone(self, key: ProcessKey, reason: str) -> None:
        """A process is forgotten."""
        self._put(self._processes.gone(key, reason, self._wall_clock()))

    def sweep(self, snapshot: Snapshot) -> None:
        """Whoever is not in the snapshot fell silent; called once a second."""
        keys = [process.key for process in snapshot.processes]
        self._put(self._processes.keep_only(keys, self._silent_reason, self._wall_clock()))

    def action_asked(self, asked: SubmittedAction) -> Future[bool]:
        """An action begins; true once that is kept."""
        return self.log.put([asked_event(asked)])

    def action_finished(self, action: Action) -> Future[bool] | None:
        """Nothing more will become of an action; true once that is kept. A dry run did nothing and is no event."""
        return None if action.dry_run else self.log.put([action_event(action, self._wall_clock())])

    def _name(self, process: ReportingProcess) -> int | str:
        names = Names.of(self._snapshot())
        named = {reporter.key: name for name, reporter in names.silent}
        named.update((reporter.key, name) for name, reporter in names.reporting)
        return json_pid(named.get(process.key, process.label_pid))

    def _put(self, events: Iterable[Event]) -> None:
        for event in events:
            self.log.put((event,))
