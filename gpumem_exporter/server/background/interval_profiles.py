"""Takes the profiles of `--profile.interval`: a small one of each process, again and again, without a recording.

One process takes a profile at a time, and the processes of a node are spread over the interval. A process that starts
an inference engine or captures a CUDA graph refuses, and has its next turn after another interval.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpumem_exporter.actions.caller import Caller
from gpumem_exporter.actions.declarations import ActionRequest, Target
from gpumem_exporter.actions.dispatcher import Dispatcher
from gpumem_exporter.core.samples import ProcessKey, Snapshot
from gpumem_exporter.errors import ActionRefusedError

_log = logging.getLogger(__name__)


class IntervalProfiles:
    """Requests the profiles. Used on the event loop only."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        snapshot: Callable[[], Snapshot],
        *,
        interval_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._snapshot = snapshot
        self._interval_seconds = interval_seconds
        self._clock = clock
        # When the next profile of each process and session is due.
        self._due_seconds: dict[tuple[ProcessKey, str], float] = {}
        # When each share (`ProcessKey.share`) had its last turn.
        self._turns: dict[str, float] = {}
        self._running_id = ""
        self._pause_ends_seconds = float("-inf")

    def tick(self) -> None:
        """Request a profile that is due, if none is being taken; called once a second."""
        running = self._dispatcher.get(self._running_id)
        if running is not None and not running.finished:
            return
        now, before = self._clock(), self._due_seconds
        names = {
            (process.key, process.report.process.session): name
            for name, process in self._snapshot().names.reporting
            if "profile" in process.report.actions
        }
        # A process has nothing to show when it starts.
        self._due_seconds = {each: before.get(each, now + self._interval_seconds) for each in names}
        due = [each for each, seconds in self._due_seconds.items() if seconds <= now]
        if not due or now < self._pause_ends_seconds:
            return
        # In turns: otherwise processes that a user invents, which never answer, delay the profiles of other users.
        first = min(due, key=lambda each: (self._turns.get(each[0].share, 0.0), self._due_seconds[each]))
        self._turns = {key.share: self._turns.get(key.share, 0.0) for key, _ in names} | {first[0].share: now}
        self._due_seconds[first] = now + self._interval_seconds
        # Processes that are due at one time are spread over half of the interval.
        self._pause_ends_seconds = now + self._interval_seconds / (2 * len(names))
        request = ActionRequest("profile", Target(pid=names[first]))
        try:
            self._running_id = self._dispatcher.submit(request, requested_by=Caller.interval(), unlisted=True).id
        except ActionRefusedError as error:
            _log.debug("no profile of pid %s: %s", names[first], error)
