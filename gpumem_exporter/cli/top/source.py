"""The source of `top`: an exporter, or the driver if no exporter answers and no address was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.errors import ExporterError, ExporterUnreachableError
from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node_document import devices_and_processes, read_node
from gpumem_exporter.cli.selection import concerns, require_known, selected
from gpumem_exporter.cli.top.history import Events, History, Past
from gpumem_exporter.cli.top.rows import Row, rows_of
from gpumem_exporter.errors import NvmlError

if TYPE_CHECKING:
    from gpumem_exporter.cli.top.driver import DriverReader

__all__ = ["Reading", "Source"]

Document = Mapping[str, Any]

_ANSWER_SECONDS = 2.0
"""The timeout for an answer."""
_EVERYTHING = Target()
_RETRY_SECONDS = 3.0
"""Seconds between attempts to reach an exporter while NVML is the fallback source."""


@dataclass(frozen=True)
class Reading:
    """The values of one reading that the target selects."""

    devices: Document
    """The document of `/api/v1/devices`."""
    processes: Document
    """The document of `/api/v1/processes`."""
    rows: tuple[Row, ...]
    url: str = ""
    """The exporter's address; empty if only the driver was read."""
    without_exporter: str = ""
    """Why only the driver was read."""
    read_seconds: float = 0.0
    """The time of the reading, by the clock of `past`."""
    past: Past = field(default_factory=dict)
    """The last ten minutes of each device."""
    events: tuple[Document, ...] | None = None
    """The last events, as in `/api/v1/events`; None if they are unknown."""
    no_events: str = ""
    """Why the events are unknown; empty if there is no reason."""
    target: Target = _EVERYTHING
    """What the user selected."""

    def of(self, target: Target) -> Reading:
        """Return what a target selects of the reading."""
        devices, processes = selected(target, self.devices, self.processes)
        events = None if self.events is None else tuple(event for event in self.events if concerns(target, event))
        rows = rows_of(processes)
        return replace(self, devices=devices, processes=processes, rows=rows, events=events, target=target)

    @property
    def taken_unix_seconds(self) -> float | None:
        """When the driver was read, by the clock of the events."""
        taken: float | None = self.devices.get("taken_unix_seconds")
        return taken


class Source:
    """Reads the exporter, or the driver. Not thread-safe.

    Args:
        urls: the exporter's addresses to try, in order.
        token: the exporter's token; empty for none.
        driver: opens the driver. None if the user chose an exporter, because then the driver is no substitute.
        target: what the readings have.

    Raises:
        ConfigurationError: an address is invalid.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        token: str = "",
        driver: Callable[[], DriverReader] | None = None,
        target: Target = _EVERYTHING,
        open_api: Callable[[], ExporterApi] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_api = open_api or (lambda: ExporterApi(urls, token=token, timeout_seconds=_ANSWER_SECONDS))
        self._open_driver = driver
        self._clock = clock
        self._target = target
        self._target_checked = False
        self._api = self._open_api()
        self._driver: DriverReader | None = None
        self._exporter_error = ""
        self._next_attempt = -float("inf")
        self._history = History()
        self._events = Events()

    def read(self, *, with_past: bool = True) -> Reading:
        """Read the exporter. If it does not answer, read the driver, unless the user chose an exporter.

        `with_past` also takes the last ten minutes, and queries the last events, if they are due.

        Raises:
            ExporterError: the exporter does not answer, and the driver cannot replace it.
            TargetNotFoundError: a name of the target is unknown in the first reading. Later, its process may exit.
        """
        reading = self._read(with_past=with_past)
        if not self._target_checked:
            require_known(self._target, reading.devices, reading.processes)
            self._target_checked = True
        return reading.of(self._target)

    def _read(self, *, with_past: bool) -> Reading:
        open_driver = self._open_driver
        if open_driver is not None and self._driver is not None and self._clock() < self._next_attempt:
            return self._read_driver(open_driver)
        try:
            reading = self._read_exporter(with_past=with_past)
        except ExporterError as error:
            self._exporter_error = str(error)
            self._events.forget()
            # Another of the addresses may answer the next time.
            self._api.close()
            self._api = self._open_api()
            if open_driver is None:
                raise
            self._next_attempt = self._clock() + _RETRY_SECONDS
            return self._read_driver(open_driver)
        self._release_driver()
        return reading

    def close(self) -> None:
        """Close the API and the driver."""
        self._api.close()
        self._release_driver()

    def _read_exporter(self, *, with_past: bool) -> Reading:
        live = read_node(self._api)
        devices, processes = devices_and_processes(live)
        rows = rows_of(processes)
        now = self._clock()
        if with_past:
            self._take_past(live, now)
        self._history.add(devices, now)
        events, refusal = self._events.known, self._events.refusal
        past = self._history.past()
        return Reading(devices, processes, rows, self._api.url, "", now, past, events=events, no_events=refusal)

    def _take_past(self, live: Document, now: float) -> None:
        if self._history.due(now):
            self._history.take(live, now)
        if self._events.due(now):
            try:
                self._events.take(self._api.get(self._events.path), now)
            except ExporterError as error:
                self._events.failed(error, now)

    def _read_driver(self, open_driver: Callable[[], DriverReader]) -> Reading:
        self._driver = self._driver or open_driver()
        try:
            devices, processes = self._driver.read()
        except NvmlError as error:
            self._release_driver()
            raise ExporterUnreachableError(
                f"{self._exporter_error}. The driver alone cannot be read either: {error}"
            ) from error
        now = self._clock()
        self._history.add(devices, now)
        return Reading(devices, processes, rows_of(processes), "", self._exporter_error, now, self._history.past())

    def _release_driver(self) -> None:
        if self._driver is not None:
            self._driver.release()
            self._driver = None
