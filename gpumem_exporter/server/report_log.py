"""Logs the reports that the exporter refuses or shortens: each process once an hour, and few processes of each user."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gpumem_exporter.core.samples import ProcessKey

__all__ = ["ReportLog"]

_FORGET_SECONDS = 3600.0
_MAX_PROCESSES = 16
"""The maximum number of processes of one user that are named for each outcome in an hour. A user can invent others."""

_log = logging.getLogger(__name__)


class ReportLog:
    """Names the processes whose reports are not stored as they are. `gpumem_reports_total` counts every report.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._named: dict[tuple[str, str], dict[ProcessKey, float]] = {}
        """When each process was named, by outcome and `ProcessKey.share`."""

    def name(self, outcome: str, process: ProcessKey, workload: str, why: str) -> None:
        """Log one report, unless the process was named in the last hour."""
        now = self._clock()
        named = self._named.setdefault((outcome, process.share), {})
        for earlier in [key for key, seconds in named.items() if now - seconds >= _FORGET_SECONDS]:
            del named[earlier]
        if process in named or len(named) >= _MAX_PROCESSES:
            return
        named[process] = now
        fields = {"outcome": outcome, "pid": process.pid, "uid": process.owner_uid, "workload": workload, "why": why}
        _log.warning("report not stored as sent", extra={"fields": fields})
