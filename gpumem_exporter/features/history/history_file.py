"""The file of the history in the folder of `--storage.path`: written whole, read at the start.

It is compressed, with a line of JSON for each series before the values of the series, and then a line for the minima of
each process on each device. gzip's checksum detects damage.
"""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import os
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpumem_exporter.core.samples import PartKey
from gpumem_exporter.features.history.history import MAX_BYTES, History
from gpumem_exporter.features.history.series import Subject

FILE_NAME = "history.gz"

_FORMAT = {"format": "gpumem-history", "version": 1, "byteorder": sys.byteorder}
# Compresses a full history of 16 MiB in about 0.3 s of CPU. A higher level takes much longer and gains little.
_LEVEL = 1
_PIECE_BYTES = 256 << 10
_MAX_LINE = 64 << 10

_log = logging.getLogger(__name__)


class HistoryFile:
    """Saves a history, and reads it again. Not thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE_NAME

    def __str__(self) -> str:
        return str(self._path)

    def load(self, history: History, *, wait_for_clock: bool = True) -> bool:
        """Restore the history of an earlier run. A file that cannot be read is logged, and moved if it is damaged.

        Returns False, and restores nothing, if the file has rows that the wall clock has not reached: the clock may be
        behind until the machine has synchronized it. Do not save then. Without `wait_for_clock`, drops these rows.
        """
        try:
            with gzip.open(self._path, "rb") as file:
                while file.read(_PIECE_BYTES):
                    pass  # the checksum is at the end, and no row of a damaged file may be shown
                file.seek(0)
                _require_format(_line(file))
                minima: list[tuple[PartKey, int, list[int]]] = []
                saved = list(_series(file, minima))
            if wait_for_clock and history.is_behind(saved):
                return False
            history.restore(saved)
            history.restore_minima(minima)
        except FileNotFoundError:
            pass
        except (EOFError, zlib.error, ValueError, TypeError, LookupError, gzip.BadGzipFile) as error:
            moved = self._path.with_name(self._path.name + ".unreadable")
            _log.warning(
                "the history of earlier runs cannot be read",
                extra={"fields": {"file": str(self._path), "error": str(error), "moved_to": str(moved)}},
            )
            with contextlib.suppress(OSError):
                self._path.replace(moved)
        except OSError as error:
            _log.warning(
                "the history of earlier runs cannot be read",
                extra={"fields": {"file": str(self._path), "error": error.strerror or str(error)}},
            )
        return True

    def save(self, history: History) -> int:
        """Replace the file; returns its size in bytes. Raises OSError; the file is then the previous one."""
        self._path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = self._path.with_name(self._path.name + ".new")
        try:
            descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as raw:
                with gzip.GzipFile("", "wb", _LEVEL, raw) as file:
                    _write(file, _FORMAT)
                    for subject, tracks in history.saved():
                        _write(
                            file, {"subject": tuple(subject), "tracks": [[first, len(rows)] for first, rows in tracks]}
                        )
                        for _, rows in tracks:
                            file.write(rows)
                    # At the end: a version that does not know them has then restored the series.
                    for part, first, values in history.saved_minima():
                        _write(file, {"part": part, "first": first, "minima": values})
                raw.flush()
                os.fsync(raw.fileno())
                size = raw.tell()
            new.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                new.unlink()
            raise
        return size


def _write(file: gzip.GzipFile, line: object) -> None:
    file.write(json.dumps(line).encode() + b"\n")


def _line(file: gzip.GzipFile) -> dict[str, Any] | None:
    """Return the next line; None at the end."""
    text = file.readline(_MAX_LINE)
    line = json.loads(text) if text else None
    if text and not isinstance(line, dict):
        raise ValueError("a line is not an object")
    return line


def _require_format(line: dict[str, Any] | None) -> None:
    if line is None or line.get("format") != _FORMAT["format"]:
        raise ValueError("it is not a history")
    if line != _FORMAT:
        raise ValueError(f"another version or machine wrote it ({line.get('version')}, {line.get('byteorder')})")


def _series(
    file: gzip.GzipFile, minima: list[tuple[PartKey, int, list[int]]]
) -> Iterator[tuple[Subject, list[tuple[int, bytes]]]]:
    """Yield the series, and append to `minima` what follows them."""
    left = 2 * MAX_BYTES
    while (line := _line(file)) is not None:
        if "part" in line:
            minima.append((PartKey(*line["part"]), int(line["first"]), line["minima"]))
            continue
        subject = Subject(*line["subject"])
        tracks = []
        for first, size in line["tracks"]:
            left -= size
            if left < 0 or size < 0:
                raise ValueError("it is too large")
            rows = file.read(size)
            if len(rows) != size:
                raise EOFError("it ends too early")
            tracks.append((int(first), rows))
        yield subject, tracks
