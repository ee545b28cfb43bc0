"""The file of the history in the folder of `--storage.path`: a SQLite database that a thread replaces now and then."""

from __future__ import annotations

import logging
import math
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from itertools import groupby
from pathlib import Path

from gpumem_exporter.core.history_series import StoredRow, Subject
from gpumem_exporter.features.history.history import VERSION, History
from gpumem_exporter.node.failures import FailureLog

FILE_NAME = "history.db"
_SERIES = """SELECT uuid, job, name, command, gpu, owner, start_time_ticks, part, points.*
    FROM subjects CROSS JOIN points ON subject = id ORDER BY id, step, time"""
# A usual history of 2 MiB writes 0.6 GB a day, one of 16 MiB 5 GB.
_SAVE_SECONDS = 300.0
# A file whose last row is further in the future waits for this time: the machine may not have set its clock yet. After
# that, the rows were written while the clock was ahead, and are dropped.
_AHEAD_SECONDS = 90.0
_CLOCK_WAIT_SECONDS = 3600.0

_log = logging.getLogger(__name__)


class HistoryFile:
    """Keeps a history in a file of a folder. A disk that hangs stops the saves only.

    After `start`, only its thread may load and save.
    """

    def __init__(self, history: History, folder: Path) -> None:
        self._history = history
        self._path = folder / FILE_NAME
        self._waits_until_seconds = time.monotonic() + _CLOCK_WAIT_SECONDS
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="gpumem-history-file", daemon=True)

    def start(self) -> None:
        """Restore the history of earlier runs, and save it from time to time. It can be started once."""
        self._thread.start()

    def stop(self, timeout_seconds: float) -> None:
        """Save the history, within the timeout."""
        self._stopping.set()
        self._thread.join(timeout_seconds)

    def load(self) -> None:
        """Restore the history of an earlier run. A damaged file, or one of another version, is logged and moved.

        Raises sqlite3.Error or OSError if the file cannot be read now, or is ahead of the wall clock.
        """
        if not self._path.exists():
            return
        try:
            waits = time.monotonic() < self._waits_until_seconds
            latest_seconds = self._history.wall_clock() + _AHEAD_SECONDS if waits else math.inf
            self._history.restore(_series(self._path, latest_seconds))
        except sqlite3.DatabaseError as error:
            # Python raises the base class only for a damaged file, and a subclass for other errors.
            if type(error) is not sqlite3.DatabaseError:
                raise
            moved = self._path.with_name(self._path.name + ".unreadable")
            self._path.replace(moved)
            fields = {"file": str(self._path), "error": str(error), "moved_to": str(moved)}
            _log.warning("the history of earlier runs cannot be read", extra={"fields": fields})

    def save(self) -> None:
        """Replace the file. Raises sqlite3.Error or OSError; then the file before stays."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_name(FILE_NAME + ".new")
        new.unlink(missing_ok=True)
        new.touch(mode=0o600)
        # The copy in memory takes some milliseconds, and the disk may take any time, in which rows arrive.
        with closing(self._history.copy()) as copy, closing(sqlite3.connect(new)) as file:
            file.execute("PRAGMA journal_mode = OFF")
            copy.backup(file)
        new.replace(self._path)

    def _keep(self) -> None:
        failures = FailureLog(_log, time.monotonic)
        loaded = stopping = False
        while True:
            try:
                if not loaded:
                    self.load()  # first: a save would lose the rows of a file that cannot be read now
                if loaded or stopping:
                    self.save()
                loaded = True
            except (sqlite3.Error, OSError) as error:
                failures.failed(str(self._path), f"the history cannot be read or saved: {error}")
            else:
                failures.recovered(str(self._path))
            if stopping:
                return
            stopping = self._stopping.wait(_SAVE_SECONDS)


def _series(path: Path, latest_seconds: float) -> Iterator[tuple[Subject, list[StoredRow]]]:
    """Yield each series of a file. Raises sqlite3.DatabaseError if it is damaged or of another version.

    Raises OSError if it has a later row.
    """
    with closing(sqlite3.connect(path, timeout=0)) as file:
        # SQLite does not check texts. An error would stop all later saves.
        file.text_factory = partial(str, encoding="utf-8", errors="replace")
        damage, version = (file.execute(f"PRAGMA {name}").fetchone()[0] for name in ("quick_check(1)", "user_version"))
        if damage != "ok" or version != VERSION:
            raise sqlite3.DatabaseError(f"version {version}, not {VERSION}; {damage}")
        # The minima of the present minute are stored before its end.
        if file.execute("SELECT coalesce(max(time + step), 0) FROM points").fetchone()[0] > latest_seconds:
            raise OSError("the wall clock is behind its last values")
        for subject, rows in groupby(file.execute(_SERIES), key=lambda row: row[:8]):
            yield Subject(*subject), [row[9:] for row in rows]
