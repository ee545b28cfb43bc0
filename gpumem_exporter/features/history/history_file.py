"""The file of the history in the folder of `--storage.path`: a SQLite database, to which a thread adds new rows."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from gpumem_exporter.features.history.history import History
from gpumem_exporter.features.history.point_table import MAX_BYTES, PointTable
from gpumem_exporter.node.failures import FailureLog

FILE_NAME = "history.db"
_FILE_OF_0_3 = "history.gz"
# The file keeps rows for which the memory has no room any more. A larger one is written again.
_MAX_FILE_BYTES = 2 * MAX_BYTES
# What a row adds to the disk: itself, and to the journal the page before.
_ROW_BYTES = 100
_SAVE_SECONDS = 60.0
# Much is saved less often, so that the disk writes at most 1.4 GB a day. A device or a job has 7 kB a minute.
_SAVED_BYTES_PER_SECOND = 16 << 10
# Rows that are further in the future show that the wall clock is behind.
_BEHIND_SECONDS = 90.0
# How long a file with rows in the future is kept as it is, because the wall clock may be behind. After that, these rows
# were written while the clock was ahead.
_CLOCK_WAIT_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class HistoryFile:
    """Keeps a history in a file of a folder. A disk that hangs stops the saves only.

    After `start`, only its thread may load and save.
    """

    def __init__(self, history: History, folder: Path) -> None:
        self._history = history
        self._path = folder / FILE_NAME
        # The rows until this time are in the file.
        self._saved_seconds = 0.0
        # How often the wall clock had been set when they were saved; None if the file has to be written again.
        self._clock_steps: int | None = None
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

    def load(self, *, wait_for_clock: bool = True) -> bool:
        """Restore the history of an earlier run. A file that cannot be read is logged, and moved if it is damaged.

        Returns False if a save would lose the file's rows: the file could not be read this time, or it has rows that
        the wall clock has not reached. The clock may be behind until the machine has synchronized it. Without
        `wait_for_clock`, drops these rows.
        """
        try:
            self._path.with_name(_FILE_OF_0_3).unlink(missing_ok=True)
            if not self._path.exists():
                return True
            with self._open() as table:
                table.check()
                last_seconds = table.last_seconds
                # The minima of the last minute of an earlier run were stored before its end.
                is_behind = last_seconds > self._history.now_seconds + _BEHIND_SECONDS
                if is_behind and wait_for_clock:
                    _log.warning("the history of earlier runs waits: the wall clock is behind its last values")
                    return False
                clock_steps = self._history.clock_steps
                self._history.restore(table.series())
            self._saved_seconds = last_seconds
            self._clock_steps = None if is_behind else clock_steps
        except (sqlite3.Error, OSError) as error:
            fields = {"file": str(self._path), "error": str(error)}
            # Python raises the base class only for a damaged file, and a subclass for other errors.
            is_damaged = type(error) is sqlite3.DatabaseError
            if is_damaged:
                moved = self._path.with_name(self._path.name + ".unreadable")
                fields["moved_to"] = str(moved)
                with contextlib.suppress(OSError):
                    self._path.replace(moved)
            _log.warning("the history of earlier runs cannot be read", extra={"fields": fields})
            return is_damaged
        except Exception:  # noqa: BLE001 - the history works without earlier runs
            _log.exception("the history of earlier runs cannot be restored")
        return True

    def save(self) -> int:
        """Save what has changed; returns about the bytes written. Raises sqlite3.Error or OSError; nothing is saved."""
        history = self._history
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._path.touch(mode=0o600)
        now_seconds, clock_steps, count = history.now_seconds, history.clock_steps, 0
        with self._open() as table:
            since_seconds = self._saved_seconds
            if clock_steps != self._clock_steps or table.size_bytes > _MAX_FILE_BYTES:
                table.clear()
                since_seconds = 0.0
            for subject, rows in history.rows(since_seconds):
                table.put(subject, rows)
                count += len(rows)
            table.expire(now_seconds)
            table.commit()
        self._saved_seconds, self._clock_steps = now_seconds, clock_steps
        return _ROW_BYTES * count

    def _keep(self) -> None:
        end_seconds = time.monotonic() + _CLOCK_WAIT_SECONDS
        loaded = self.load()
        failures = FailureLog(_log, time.monotonic)
        size_bytes = 0
        stopping = False
        while not stopping:
            stopping = self._stopping.wait(max(_SAVE_SECONDS, size_bytes / _SAVED_BYTES_PER_SECOND))
            loaded = loaded or self.load(wait_for_clock=time.monotonic() < end_seconds)
            if not loaded:
                continue
            try:
                size_bytes = self.save()
            except (sqlite3.Error, OSError) as error:
                failures.failed(str(self._path), f"the history cannot be saved: {error}")
            else:
                failures.recovered(str(self._path))

    @contextlib.contextmanager
    def _open(self) -> Iterator[PointTable]:
        table = PointTable(str(self._path), retention_seconds=self._history.retention_seconds)
        try:
            yield table
        finally:
            table.close()
