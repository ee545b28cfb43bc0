"""The thread that keeps the history in a file."""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from pathlib import Path

from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.history_file import HistoryFile
from gpumem_exporter.node.failures import FailureLog

_SAVE_SECONDS = 60.0
# Much is saved less often, so that the disk writes at most 1.4 GB a day. A device or a job has 7 kB a minute.
_SAVED_BYTES_PER_SECOND = 16 << 10
# How long a file with rows in the future is kept as it is, because the wall clock may be behind. After that, these rows
# were written while the clock was ahead.
_CLOCK_WAIT_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class HistoryRecorder:
    """Keeps a history in a file of a folder. A disk that hangs stops the saves only."""

    def __init__(self, history: History, folder: Path) -> None:
        self._history = history
        self._file = HistoryFile(folder)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gpumem-history-file", daemon=True)

    def start(self) -> None:
        """Restore the history of earlier runs, and save it from time to time. It can be started once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Save the history, within the timeout."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(timeout_seconds)

    def _keep(self) -> None:
        end_seconds = time.monotonic() + _CLOCK_WAIT_SECONDS
        loaded = self._load(wait_for_clock=True)
        failures = FailureLog(_log, time.monotonic)
        size_bytes = 0
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(max(_SAVE_SECONDS, size_bytes / _SAVED_BYTES_PER_SECOND))
            loaded = loaded or self._load(wait_for_clock=time.monotonic() < end_seconds)
            if not loaded:
                continue
            try:
                size_bytes = self._file.save(self._history)
            except (sqlite3.Error, OSError) as error:
                failures.failed(str(self._file), f"the history cannot be saved: {error}")
            else:
                failures.recovered(str(self._file))

    def _load(self, *, wait_for_clock: bool) -> bool:
        """Restore the history of earlier runs; returns False while the file must stay as it is."""
        try:
            loaded = self._file.load(self._history, wait_for_clock=wait_for_clock)
        except Exception:  # noqa: BLE001 - the history works without earlier runs
            _log.exception("the history of earlier runs cannot be restored")
            return True
        if not loaded:
            _log.warning("the history of earlier runs is not restored yet: the wall clock is behind its last values")
        return loaded
