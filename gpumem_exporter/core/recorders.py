"""What features record of reports and readings. These classes record nothing: a feature replaces each by its own."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future

from gpumem_client.wire.protocol import ProcessIdentity
from gpumem_exporter.core.event import Event, Page, Query
from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.core.samples import ProcessKey, ReportingProcess


class Journal:
    """The log of events, for the parts that record and read events. Thread-safe."""

    def put(self, event: Event) -> Future[bool]:
        """Queue an event; the future is true after its commit, and false if it is dropped."""
        dropped: Future[bool] = Future()
        dropped.set_result(False)
        return dropped

    def count_left_out(self, count: int) -> None:
        """Count events that are not recorded, because their user has too many."""

    async def wait_until_kept(self, committed: Future[bool]) -> None:
        """Wait until an event is committed; not long, if the disk fails or is slow."""

    async def page(self, query: Query) -> Page:
        """Return the events that match a query. Raises StorageError."""
        return Page((), query.after or 0, more=False)

    async def pages(self, query: Query, *, last: int | None = None) -> list[Event]:
        """Return the events of all pages, or of the `last` ones, oldest first. Waits until the storage can be read."""
        return []


class ProcessRecorder:
    """Follows processes from report to report, and devices from reading to reading.

    The event loop calls all methods except `take_reading`, which the poller's thread calls.
    """

    def take_report(self, process: ReportingProcess) -> None:
        """Record an accepted report."""

    def take_reading(self, reading: NodeReading) -> None:
        """Record a reading of the driver."""

    def processes_ended(self, ended: Iterable[tuple[ProcessKey, str]]) -> None:
        """Record that processes are removed from the store, each with the reason; unknown processes are ignored."""

    def late_process(self, identity: ProcessIdentity, owner_uid: int | None) -> ReportingProcess | None:
        """Return the process of this user, with the last report of this session, also if it has ended lately."""

    def gpu_of(self, uuid: str) -> str | None:
        """Return the NVML index of a device in the last reading; None if it is unknown."""


class ErrorRecorder:
    """Records the out-of-memory errors of reports. Used on the event loop only."""

    def take_report(self, process: ReportingProcess) -> Future[bool] | None:
        """Record the errors of a report, also of a process that has exited.

        The future is true once they are committed; None if there is nothing to wait for.
        """

    def processes_ended(self, ended: Iterable[tuple[ProcessKey, str]]) -> None:
        """Note that processes have ended, which the store still has."""

    def has_error(self, process: ReportingProcess, number: int) -> bool:
        """Return whether a process has reported an error to this run of the exporter."""
        return False

    async def knows_error(self, process: ReportingProcess, number: int) -> bool:
        """Return whether a process has reported an error, also to an earlier run of the exporter."""
        return False
