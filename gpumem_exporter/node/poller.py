"""The thread that polls the driver. If the driver hangs, only this thread hangs."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from gpumem_exporter.core.readings import NodeReading
from gpumem_exporter.node.failures import FailureLog
from gpumem_exporter.node.host import Host
from gpumem_exporter.node.provider import Provider
from gpumem_exporter.node.reader import NodeReader

_logger = logging.getLogger(__name__)

MIN_POLL_SPACING_SECONDS = 0.05
"""The minimum time between two polls, however many polls are requested."""

_STUCK_SECONDS = 5.0
_STUCK_INTERVALS = 3.0


@dataclass(frozen=True, slots=True)
class ReleaseRequest:
    """A request to release NVML, which is in force until NVML is attached again."""

    requested_by: str
    requested_unix_seconds: float
    reason: str = ""

    def __str__(self) -> str:
        because = f" ({self.reason})" if self.reason else ""
        return f"released on request by {self.requested_by}{because}"


@dataclass(frozen=True, slots=True)
class PollerStatus:
    """The state of the poller."""

    alive: bool
    """The thread runs."""
    polls: int
    """The number of completed polls."""
    busy_seconds: float | None
    """The duration of the running poll so far; None between polls."""
    stuck: bool
    """The driver hangs: a poll has been running for longer than 5 s and longer than three intervals."""
    error: str
    """Why the last poll found no driver; empty if it found one."""
    release: ReleaseRequest | None = None
    """The release request in force."""
    request_applied: bool = True
    """The last poll has applied the latest request to release or attach NVML."""


@dataclass(frozen=True, slots=True)
class _Progress:
    request: object
    """The request that the last poll applied."""
    polls: int = 0
    busy_since_seconds: float | None = None
    error: str = ""


class Poller:
    """Polls a provider in a thread named `gpumem-poller` and publishes each reading.

    Each poll publishes a reading, which says so if there is no driver. Only the thread uses the provider, and calls
    `publish`. Only `stop` ends it. The methods may be called from any thread.
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
        self._wall_clock = wall_clock
        self._failures = FailureLog(_logger, clock)
        self._stopping = threading.Event()
        self._woken = threading.Event()
        # The latest request: a `ReleaseRequest`, or an object without a value for each request to attach NVML.
        self._request: object = object()
        self._progress = _Progress(self._request)  # only the poller's thread replaces it, so readers need no lock
        # A daemon, so that a hung driver does not prevent the interpreter from exiting.
        self._thread = threading.Thread(target=self._run, name="gpumem-poller", daemon=True)

    def start(self) -> None:
        """Start polling immediately. A poller can be started once."""
        self._thread.start()

    def poll_soon(self) -> None:
        """Poll before the interval ends, because the state of the driver has changed."""
        self._woken.set()

    def release(self, requested_by: str, reason: str = "") -> None:
        """Release NVML at the next poll, which follows immediately, until `attach` is called.

        NVML is released when `status` returns `request_applied`; a hung driver delays that. While NVML is released,
        polls continue and publish readings without a driver. A second release request changes nothing.
        """
        if not isinstance(self._request, ReleaseRequest):
            self._request = ReleaseRequest(requested_by, self._wall_clock(), reason)
        self._woken.set()

    def attach(self) -> None:
        """Attach NVML at the next poll, which follows immediately, after a release or a failure."""
        self._request = object()
        self._woken.set()

    def stop(self, timeout_seconds: float) -> bool:
        """Stop the thread, and return whether it ended within the timeout. May be called again.

        A thread that hangs in the driver does not end, but it publishes nothing.
        """
        self._stopping.set()
        self._woken.set()
        if self._thread.ident is None:
            return True
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def status(self, now_seconds: float) -> PollerStatus:
        """Return the state of the poller at this time of its clock. Never blocks."""
        progress, request = self._progress, self._request
        busy_seconds = None
        if progress.busy_since_seconds is not None:
            busy_seconds = max(0.0, now_seconds - progress.busy_since_seconds)
        limit_seconds = max(_STUCK_SECONDS, _STUCK_INTERVALS * self._interval_seconds)
        return PollerStatus(
            alive=self._thread.is_alive(),
            polls=progress.polls,
            busy_seconds=busy_seconds,
            stuck=busy_seconds is not None and busy_seconds > limit_seconds,
            error=progress.error,
            release=request if isinstance(request, ReleaseRequest) else None,
            request_applied=progress.request is request,
        )

    def _run(self) -> None:
        started_seconds = self._clock()
        while not self._stopping.is_set():
            self._poll()
            # Polls start at whole intervals; the polls that a slow driver misses are skipped. The first wait ignores
            # `_woken`, so that requests for polls cannot use up a core.
            wait_seconds = self._interval_seconds - (self._clock() - started_seconds) % self._interval_seconds
            self._stopping.wait(min(MIN_POLL_SPACING_SECONDS, wait_seconds))
            self._woken.wait(max(0.0, wait_seconds - MIN_POLL_SPACING_SECONDS))
            self._woken.clear()
        self._reader.close()

    def _poll(self) -> None:
        before, request = self._progress, self._request
        self._progress = replace(before, busy_since_seconds=self._clock())
        error = before.error
        try:
            reading = self._read(request, is_new=request is not before.request)
            error = reading.error
            if reading.duration_seconds > self._interval_seconds:
                _logger.debug("reading late: the driver took %.3f s", reading.duration_seconds)
            if not self._stopping.is_set():
                self._publish(reading)
        except Exception as failure:  # noqa: BLE001 - only stop() ends the thread
            error = f"{type(failure).__name__}: {failure}"
            self._failures.failed("poll", error, exc_info=True)
        else:
            self._failures.recovered("poll")
        self._progress = _Progress(request, before.polls + 1, error=error)

    def _read(self, request: object, *, is_new: bool) -> NodeReading:
        if isinstance(request, ReleaseRequest):
            return self._reader.release(str(request))
        if is_new:
            self._reader.retry_attach_now()
        return self._reader.read()
