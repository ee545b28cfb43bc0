"""Reads files again when they change, so that a token or a certificate can be rotated without a restart."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from typing import Protocol

__all__ = ["FileRefresher", "Refreshable", "file_version"]

REFRESH_SECONDS = 1.0


class Refreshable(Protocol):
    """The content of files."""

    def refresh(self) -> None:
        """Read the files if they changed. May block on the disk; must not raise."""


class FileRefresher:
    """Refreshes files once a second in a daemon thread, so that a hung mount delays neither requests nor exit.

    Args:
        files: the files; `start` reads them for the first time.
    """

    def __init__(self, files: Sequence[Refreshable]) -> None:
        self._files = files
        self._stopped = threading.Event()

    def start(self) -> None:
        """Read the files, then refresh them until `stop`."""
        for file in self._files:
            file.refresh()
        if self._files:
            threading.Thread(target=self._run, name="gpumem-files", daemon=True).start()

    def stop(self) -> None:
        """End the thread; does not wait for it."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(REFRESH_SECONDS):
            for file in self._files:
                file.refresh()


def file_version(status: os.stat_result) -> tuple[int, ...]:
    """Return what differs after a change of the file: a mounted Kubernetes secret is replaced, not written."""
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
