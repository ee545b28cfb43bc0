"""The thread that polls the driver. A driver that hangs, hangs this thread and nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpumem_exporter.core.samples import NodeReading
from gpumem_exporter.host.protocol import Host
from gpumem_exporter.nvml.provider import Provider
from gpumem_exporter.nvml.reader import NodeReader
from gpumem_exporter.nvml.trouble_log import TroubleLog

__all__ = ["SOON_SECONDS", "Poller", "PollerStatus", "Release", "Schedule"]

_logger = logging.getLogger(__name__)

SOON_SECONDS = 0.05
"""The least time between two polls, however many are asked for."""

_STUCK_SECONDS = 5.0
_STUCK_INTERVALS = 3.0


@dataclass(frozen=True, slots=True)
class Release:
    """Somebody wants the driver let go, until somebody wants it back."""

    requested_by: str
    requested_unix_seconds: float
    reason: str = ""

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"released on request by {self.requested_by}{because}"


@dataclass(frozen=True, slots=True)
class PollerStatus:
    """How the poller is doing; durations in seconds."""

    alive: bool
    """Its thread runs."""
    polls: int
    """How many polls have ended."""
    busy_seconds: float | None
    """How long the poll that is running has been running; None between two."""
    last_finished_seconds: float | None
    """When the last poll ended, on the poller's clock; None before the first."""
    stuck: bool
    """A poll has been running for longer than 5 s and than three intervals: the driver hangs."""
    error: str
    """Why the last poll found no driver; empty when it did."""
    release: Release | None = None
    """The request to let the driver go that is in force."""
    settled: bool = True
    """The last poll knew of the last request to release or to attach, and has done it."""


@dataclass(frozen=True, slots=True)
class _Order:
    """What was asked for last."""

    number: int = 0
    release: Release | None = None


@dataclass(frozen=True, slots=True)
class _Progress:
    polls: int = 0
    busy_since_seconds: float | None = None
    last_finished_seconds: float | None = None
    error: str = ""
    order: int = 0
    """Number of the order that the last poll obeyed."""


class Schedule:
    """Ticks at whole multiples of an interval: no drift, and ticks that were missed are not made up for.

    Args:
        interval_seconds: from tick to tick.
        start_seconds: the tick before the first, on a monotonic clock.
    """

    def __init__(self, interval_seconds: float, start_seconds: float) -> None:
        self._interval_seconds = interval_seconds
        self._start_seconds = start_seconds
        self._tick = 0

    def seconds_to_next(self, now_seconds: float) -> float:
        """Go on to the next tick that is still to come, and say how far away it is."""
        passed = int((now_seconds - self._start_seconds) // self._interval_seconds)
        self._tick = max(self._tick, passed) + 1
        return max(0.0, self._start_seconds + self._tick * self._interval_seconds - now_seconds)


class Poller:
    """Polls a provider in a thread of its own, called `gpumem-poller`, and publishes each reading.

    A reading is published at each poll, also while there is no driver: it then says so. The thread ends by `stop`
    alone. It is a daemon: one that hangs in the driver does not keep the interpreter.

    Args:
        provider: the driver, closed; only this thread talks to it.
        host: what the operating system says of processes.
        publish: takes each reading, in the poller's thread.
        interval_seconds: from the start of one poll to that of the next.
        clock: monotonic seconds.
        wall_clock: seconds of the Unix epoch.
    """

    def __init__(
        self,
        provider: Provider,
        host: Host,
        publish: Callable[[NodeReading], None],
        *,
        interval_seconds: float,
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self._reader = NodeReader(provider, host, clock=clock, wall_clock=wall_clock)
        self._publish = publish
        self._interval_seconds = interval_seconds
        self._clock = clock
        self._troubles = TroubleLog(_logger, clock)
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._wall_clock = wall_clock
        self._ordering = threading.Lock()
        self._order = _Order()
        self._progress = _Progress()  # replaced whole, by the poller's thread alone: readers need no lock
        self._thread = threading.Thread(target=self._run, name="gpumem-poller", daemon=True)

    def start(self) -> None:
        """Start polling, at once. A poller is started once.

        Raises:
            RuntimeError: it was started before.
        """
        self._thread.start()

    def poll_soon(self) -> None:
        """Poll before the interval is over: something has just changed what the driver says. Any thread may call it.

        At most one poll in `SOON_SECONDS`, however often it is called.
        """
        self._woken.set()

    def release(self, requested_by: str, reason: str = "") -> None:
        """Have the driver let go at the next poll, which comes soon, and not taken up again before `attach`.

        Done once `status` says that it is settled, which a driver that hangs delays. While it is released, polls go on
        and publish that there is no driver. Any thread may call it; a second request changes nothing.
        """
        with self._ordering:
            if self._order.release is None:
                release = Release(requested_by, self._wall_clock(), reason)
                self._order = _Order(self._order.number + 1, release)
        self._woken.set()

    def attach(self) -> None:
        """Take a released driver up again, or look for a missing one at once. Any thread may call it."""
        with self._ordering:
            self._order = _Order(self._order.number + 1)
        self._woken.set()

    def stop(self, timeout_seconds: float) -> bool:
        """Ask the thread to end and wait for it, no longer than the timeout; any thread may call it, also twice.

        Returns:
            Whether it ended. One that hangs in the driver does not; it publishes nothing any more.
        """
        self._stopping.set()
        self._woken.set()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def status(self, now_seconds: float) -> PollerStatus:
        """How it is doing at this moment of its clock; any thread may ask, and is not kept waiting."""
        progress, order = self._progress, self._order
        busy_seconds = None
        if progress.busy_since_seconds is not None:
            busy_seconds = max(0.0, now_seconds - progress.busy_since_seconds)
        limit_seconds = max(_STUCK_SECONDS, _STUCK_INTERVALS * self._interval_seconds)
        return PollerStatus(
            alive=self._thread.is_alive(),
            polls=progress.polls,
            busy_seconds=busy_seconds,
            last_finished_seconds=progress.last_finished_seconds,
            stuck=busy_seconds is not None and busy_seconds > limit_seconds,
            error=progress.error,
            release=order.release,
            settled=progress.order == order.number,
        )

    def _run(self) -> None:
        schedule = Schedule(self._interval_seconds, self._clock())
        while not self._stopping.is_set():
            self._poll()
            wait_seconds = schedule.seconds_to_next(self._clock())
            self._stopping.wait(min(SOON_SECONDS, wait_seconds))
            self._woken.wait(max(0.0, wait_seconds - SOON_SECONDS))
            self._woken.clear()
        self._reader.close()

    def _poll(self) -> None:
        before, order = self._progress, self._order
        self._progress = replace(before, busy_since_seconds=self._clock())
        error = before.error
        try:
            reading = self._read(order, is_new=order.number != before.order)
            error = reading.error
            if not self._stopping.is_set():
                self._publish(reading)
        except Exception as failure:  # noqa: BLE001 - the thread ends by stop() alone
            error = f"{type(failure).__name__}: {failure}"
            self._troubles.begin("poll", error, exc_info=True)
        else:
            self._troubles.end("poll")
        self._progress = _Progress(before.polls + 1, None, self._clock(), error, order.number)

    def _read(self, order: _Order, *, is_new: bool) -> NodeReading:
        if order.release is not None:
            return self._reader.release(str(order.release))
        if is_new:
            self._reader.attach_soon()
        return self._reader.read()
