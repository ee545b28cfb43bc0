"""The source of `top`: an exporter, or the driver if no exporter answers and no address was given."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.errors import ExporterAnswerError, ExporterError, ExporterUnreachableError
from gpumem_exporter.actions.request import Target
from gpumem_exporter.cli.api_client import ExporterApi
from gpumem_exporter.cli.node import Node, concerns, read_live
from gpumem_exporter.cli.render.columns import rows_of
from gpumem_exporter.errors import NvmlError

if TYPE_CHECKING:
    from gpumem_exporter.cli.top.driver import DriverReader

Document = Mapping[str, Any]
EVERYTHING = Target()
Past = Mapping[str, tuple[tuple[float, int], ...]]
"""The seconds and the bytes in use (total minus free) of each device, by uuid. A time without a reading is left out."""

_RETRY_SECONDS = 3.0
"""Seconds between attempts to reach an exporter while NVML is the fallback source."""
_EVENTS_PATH = "/api/v1/events?limit=100"
_EVENTS_SECONDS = 3.0
"""Seconds between queries of events."""
_REFUSED_SECONDS = 60.0
"""Seconds until an exporter that refuses events is queried again."""


@dataclass(frozen=True)
class Reading:
    """The values of one reading that the target selects."""

    node: Node
    url: str = ""
    """The exporter's address; empty if only the driver was read."""
    without_exporter: str = ""
    """Why only the driver was read."""
    past: Past = field(default_factory=dict)
    """The last ten minutes."""
    now: float = 0.0
    """The time of the reading, by the clock of `past`."""
    events: tuple[Document, ...] | None = None
    """The last events, as in `/api/v1/events`; None if they are unknown."""
    no_events: str = ""
    """Why the events are unknown; empty if there is no reason."""
    target: Target = EVERYTHING
    """What the user selected."""

    def select(self, target: Target) -> Reading:
        """Return the part of the reading that a target selects."""
        events = None if self.events is None else tuple(event for event in self.events if concerns(target, event))
        return replace(self, node=self.node.selected(target), events=events, target=target)

    @property
    def devices(self) -> list[Document]:
        """The documents of the devices, with their last ten minutes."""
        return [
            {**device, "past": self.past.get(device.get("uuid") or "", ()), "now": self.now}
            for device in self.node.devices.get("devices") or ()
        ]

    @property
    def taken_unix_seconds(self) -> float | None:
        """When the driver was read, by the clock of the events."""
        taken: float | None = self.node.devices.get("taken_unix_seconds")
        return taken

    @property
    def rows(self) -> tuple[Document, ...]:
        """A row for each process on each device."""
        return rows_of(self.node.processes)


class Source:
    """Reads the exporter, or the driver. Not thread-safe.

    `open_driver` is None if the user chose an exporter, because then the driver is no substitute.
    """

    def __init__(
        self,
        open_api: Callable[[], ExporterApi],
        *,
        open_driver: Callable[[], DriverReader] | None = None,
        target: Target = EVERYTHING,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_api, self._open_driver = open_api, open_driver
        self._target, self._target_checked = target, False
        self._clock = clock
        self._api = open_api()
        self._driver: DriverReader | None = None
        self._exporter_error = ""
        self._next_attempt = self._next_events = -float("inf")
        self._events: tuple[Document, ...] | None = None
        self._no_events = ""

    def read(self, *, with_events: bool = True) -> Reading:
        """Read the exporter. If it does not answer, read the driver, unless the user chose an exporter.

        Raises ExporterError if the exporter does not answer, and the driver cannot replace it. Raises
        TargetNotFoundError if a name of the target is unknown in the first reading. Later, its process may exit.
        """
        reading = self._read(with_events)
        if not self._target_checked:
            reading.node.require_known(self._target)
            self._target_checked = True
        return reading.select(self._target)

    def close(self) -> None:
        """Close the API and the driver."""
        self._api.close()
        self._release_driver()

    def _read(self, with_events: bool) -> Reading:
        if self._open_driver is not None and self._driver is not None and self._clock() < self._next_attempt:
            return self._read_driver(self._open_driver)
        try:
            reading = self._read_exporter(with_events)
        except ExporterError as error:
            self._exporter_error = str(error)
            # Another address may answer the next time, from another exporter.
            self._events, self._next_events = None, -float("inf")
            self._api.close()
            self._api = self._open_api()
            if self._open_driver is None:
                raise
            self._next_attempt = self._clock() + _RETRY_SECONDS
            return self._read_driver(self._open_driver)
        self._release_driver()
        return reading

    def _read_exporter(self, with_events: bool) -> Reading:
        node, live = read_live(self._api)
        if with_events and self._clock() >= self._next_events:
            self._read_events()
        past, now = _past(live)
        return Reading(node, self._api.url, "", past, now, self._events, self._no_events)

    def _read_events(self) -> None:
        self._next_events = self._clock() + _EVENTS_SECONDS
        try:
            self._events, self._no_events = tuple(self._api.get(_EVENTS_PATH)["events"]), ""
        except ExporterAnswerError as error:
            if error.status >= 500:
                return  # the known events are still true
            forbidden = error.status in (401, 403)
            refusal = f"the exporter refuses to show events: {error.detail}"
            self._events, self._no_events = None, refusal if forbidden else "this exporter has no events"
            self._next_events += _REFUSED_SECONDS
        except ExporterError:
            # A slow answer to a second request must not delay each reading.
            self._next_events += _REFUSED_SECONDS

    def _read_driver(self, open_driver: Callable[[], DriverReader]) -> Reading:
        self._driver = self._driver or open_driver()
        try:
            return Reading(self._driver.read(), without_exporter=self._exporter_error)
        except NvmlError as error:
            self._release_driver()
            raise ExporterUnreachableError(
                f"{self._exporter_error}. The driver alone cannot be read either: {error}"
            ) from error

    def _release_driver(self) -> None:
        if self._driver is not None:
            self._driver.release()
            self._driver = None


def _past(live: Document) -> tuple[Past, float]:
    """Return the last ten minutes in `/api/v1/live`, and the time of the document by the same clock."""
    try:
        times = live["history"]["seconds"]
        past = {
            uuid: tuple((at, mib << 20) for at, mib in zip(times, line["in_use"], strict=True) if mib is not None)
            for uuid, line in live["history"]["devices"].items()
        }
        return past, float(live["moment"]["clock_seconds"])
    except (AttributeError, KeyError, TypeError, ValueError):
        return {}, 0.0  # an exporter of another version
