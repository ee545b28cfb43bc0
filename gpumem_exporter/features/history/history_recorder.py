"""The threads of the history: one does the work of each second, the other one keeps the history in a file."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from gpumem_exporter.core.samples import Snapshot
from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.history_file import HistoryFile
from gpumem_exporter.node.failures import FailureLog

_SAVE_SECONDS = 60.0
# A large history is saved less often, so that the disk writes at most 1.4 GB a day. A normal one has 0.2 MB.
_SAVED_BYTES_PER_SECOND = 16 << 10
_MIN_WAIT_SECONDS = 0.05
# How long a file with rows in the future is kept as it is, because the wall clock may be behind. After that, these rows
# were written while the clock was ahead.
_CLOCK_WAIT_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class HistoryRecorder:
    """Records the snapshots of the node in a history; with a folder, also in a file.

    A disk that hangs stops the saves, but not the recording. `snapshot` is called in the recorder's thread once a
    second, and then, with the snapshot, the `chores` in their order. A chore that fails does not affect the others.
    """

    def __init__(
        self,
        history: History,
        snapshot: Callable[[], Snapshot],
        folder: Path | None,
        chores: Mapping[str, Callable[[Snapshot], None]] | None = None,
    ) -> None:
        self._history = history
        self._snapshot = snapshot
        # One thread for all that reads each second's snapshot: at rest, to wake a thread takes longer than its work.
        self._chores = {"history": history.add, **(chores or {})}
        self._file = HistoryFile(folder) if folder is not None else None
        self._stopping = threading.Event()
        self._threads = [threading.Thread(target=self._record, name="gpumem-history", daemon=True)]
        if self._file is not None:
            keep = threading.Thread(target=self._keep, args=(self._file,), name="gpumem-history-file", daemon=True)
            self._threads.append(keep)

    def start(self) -> None:
        """Start to record. A recorder can be started once."""
        for thread in self._threads:
            thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Stop to record and save the history, within the timeout."""
        self._stopping.set()
        end_seconds = time.monotonic() + timeout_seconds
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(max(0.0, end_seconds - time.monotonic()))

    def _record(self) -> None:
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
        return max((0.5 - self._history.now_seconds) % 1.0, _MIN_WAIT_SECONDS)

    def _keep(self, file: HistoryFile) -> None:
        end_seconds = time.monotonic() + _CLOCK_WAIT_SECONDS
        loaded = self._load(file, wait_for_clock=True)
        failures = FailureLog(_log, time.monotonic)
        size_bytes = 0
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(max(_SAVE_SECONDS, size_bytes / _SAVED_BYTES_PER_SECOND))
            loaded = loaded or self._load(file, wait_for_clock=time.monotonic() < end_seconds)
            if not loaded:
                continue
            try:
                size_bytes = file.save(self._history)
            except OSError as error:
                failures.failed(str(file), f"the history cannot be saved: {error.strerror or error}")
            else:
                failures.recovered(str(file))

    def _load(self, file: HistoryFile, *, wait_for_clock: bool) -> bool:
        """Restore the history of earlier runs; returns False while the file must stay as it is."""
        try:
            loaded = file.load(self._history, wait_for_clock=wait_for_clock)
        except Exception:  # noqa: BLE001 - the history works without earlier runs
            _log.exception("the history of earlier runs cannot be restored")
            return True
        if not loaded:
            _log.warning("the history of earlier runs is not restored yet: the wall clock is behind its last values")
        return loaded
