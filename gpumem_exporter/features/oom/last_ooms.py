"""The out-of-memory errors on the metrics page: the last of each process on each device, for one hour."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from operator import attrgetter

from gpumem_exporter.core.samples import LastOom
from gpumem_exporter.core.shares import Shares

SHOWN_SECONDS = 3600.0
"""Seconds for which an error is shown: long enough for a scrape, an alert and a person."""
FATAL_SECONDS = 60.0
"""An error is taken for the cause of an end that follows within this time: a program that does not catch the error
exits as soon as its threads, loggers and checkpoints let it."""
MAX_SHOWN = 256
"""The maximum number of errors that are shown; the owner with the most loses its oldest first."""

_by_time = attrgetter("happened_seconds")


class LastOoms:
    """The last error of each process name and device. A reused pid has one error.

    Only the event loop changes it; `at` may be called by any thread.
    """

    def __init__(self) -> None:
        self._ooms: dict[tuple[str, str], LastOom] = {}
        # Replaced as a whole, the oldest first.
        self._kept: tuple[LastOom, ...] = ()

    def at(self, now_seconds: float) -> tuple[LastOom, ...]:
        """Return the errors of the last hour, the oldest first."""
        kept = self._kept
        if kept and now_seconds - kept[0].happened_seconds > SHOWN_SECONDS:
            return tuple(oom for oom in kept if now_seconds - oom.happened_seconds <= SHOWN_SECONDS)
        return kept

    def put(self, ooms: Iterable[LastOom]) -> None:
        """Add errors in the order of their arrival. An error that is already known changes nothing."""
        for oom in ooms:
            known = self._ooms.get((oom.uuid, oom.pid))
            if known is None or known.session != oom.session or known.number < oom.number:
                self._ooms[oom.uuid, oom.pid] = oom
        self._keep(self._ooms.values())

    def process_ended(self, session: str, last_seconds: float) -> None:
        """Note that the process of a reporter's session has ended; `last_seconds` is the time of its last report."""
        ended = {
            key: replace(oom, ended_process=True)
            for key, oom in self._ooms.items()
            if oom.session == session and last_seconds - oom.happened_seconds <= FATAL_SECONDS
        }
        if ended:
            self._keep((self._ooms | ended).values())

    def restore(self, ooms: Iterable[LastOom]) -> None:
        """Add the stored errors of an earlier run, the last of each process and device."""
        for oom in ooms:
            known = self._ooms.get((oom.uuid, oom.pid))
            # An error that is already known arrived after the stored one, so it stays. If both are the same error, the
            # stored one replaces it: it has the time of the event.
            if known is None or (known.session == oom.session and known.number <= oom.number):
                self._ooms[oom.uuid, oom.pid] = oom
        self._keep(self._ooms.values())

    def _keep(self, ooms: Iterable[LastOom]) -> None:
        by_owner: defaultdict[str, deque[LastOom]] = defaultdict(deque)
        shares = Shares(MAX_SHOWN)
        for oom in sorted(ooms, key=_by_time):
            by_owner[oom.owner].append(oom)
            shares.put(oom.owner)
        while (loser := shares.over()) is not None:
            by_owner[loser].popleft()
            shares.drop(loser)
        self._kept = tuple(sorted(chain.from_iterable(by_owner.values()), key=_by_time))
        self._ooms = {(oom.uuid, oom.pid): oom for oom in self._kept}
