"""The thread that does the work of each second with a new snapshot, such as a row of the history."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.node.failures import FailureLog

_MIN_WAIT_SECONDS = 0.05

_log = logging.getLogger(__name__)


class EachSecond:
    """Calls `snapshot` once a second in its thread, and with the result each of the `chores` in their order.

    A chore that fails does not affect the others. One thread for all of them: at rest, to wake a thread takes longer
    than its work.
    """

    def __init__(
        self,
        snapshot: Callable[[], Snapshot],
        chores: Mapping[str, Callable[[Snapshot], None]],
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        self._snapshot = snapshot
        self._chores = chores
        self._clock = clock
        self._origin_seconds = wall_clock() - clock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="gpumem-second", daemon=True)

    def start(self) -> None:
        """Start the thread. It can be started once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Stop the thread; a chore that runs longer is abandoned."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def _work(self) -> None:
        failures = FailureLog(_log, time.monotonic)
        while not self._stopping.wait(self._seconds_to_next()):
            try:
                snapshot = self._snapshot()
            except Exception as error:  # noqa: BLE001 - the next second must be recorded
                failures.failed("snapshot", repr(error), exc_info=True)
                continue
            failures.recovered("snapshot")
            for name, chore in self._chores.items():
                try:
                    chore(snapshot)
                except Exception as error:  # noqa: BLE001 - neither the other chores nor the next second may stop
                    failures.failed(name, repr(error), exc_info=True)
                else:
                    failures.recovered(name)

    def _seconds_to_next(self) -> float:
        """Return the time until the middle of the next second, so that a delay leaves no second without a row."""
        return max((0.5 - self._clock() - self._origin_seconds) % 1.0, _MIN_WAIT_SECONDS)
