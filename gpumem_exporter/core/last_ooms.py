"""Which out-of-memory errors are still shown: of each process on a device the last, for an hour, and not too many."""

from __future__ import annotations

from collections.abc import Iterable
from operator import attrgetter

from gpumem_exporter.core.samples import LastOom

__all__ = ["KEPT", "SHOWN_SECONDS", "LastOoms"]

SHOWN_SECONDS = 3600.0
"""How long an error is shown after it happened: long enough to be scraped, alerted upon and looked at."""
KEPT = 256
"""The most that are shown; of more, the last to have happened."""


class LastOoms:
    """Keeps errors by the process' name and the device: a pid that is used again has one. Not thread-safe."""

    def __init__(self) -> None:
        self._ooms: dict[tuple[str, str], LastOom] = {}
        self._shown: tuple[LastOom, ...] = ()
        self._expires_seconds = float("inf")

    def put(self, ooms: Iterable[LastOom]) -> None:
        """Take errors as they become known, in that order. One that was told before changes nothing."""
        for oom in ooms:
            held = self._ooms.get((oom.uuid, oom.pid))
            if held is None or held.session != oom.session or held.number < oom.number:
                self._ooms[oom.uuid, oom.pid] = oom
        self._keep(self._ooms.values())

    def recall(self, ooms: Iterable[LastOom]) -> None:
        """Take errors that an earlier run kept, of each process and device the last.

        What is held was learnt of after them. Only where it is the same error, told again, the first telling counts:
        that is what the events have.
        """
        for oom in ooms:
            held = self._ooms.get((oom.uuid, oom.pid))
            if held is None or (held.session == oom.session and held.number <= oom.number):
                self._ooms[oom.uuid, oom.pid] = oom
        self._keep(self._ooms.values())

    def at(self, now_seconds: float) -> tuple[LastOom, ...]:
        """Those that are shown at this moment."""
        if now_seconds > self._expires_seconds:
            self._keep(oom for oom in self._shown if now_seconds - oom.happened_seconds <= SHOWN_SECONDS)
        return self._shown

    def _keep(self, ooms: Iterable[LastOom]) -> None:
        self._shown = tuple(sorted(ooms, key=attrgetter("happened_seconds"))[-KEPT:])
        self._ooms = {(oom.uuid, oom.pid): oom for oom in self._shown}
        self._expires_seconds = self._shown[0].happened_seconds + SHOWN_SECONDS if self._shown else float("inf")
