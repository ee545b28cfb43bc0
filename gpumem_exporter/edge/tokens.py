"""Tokens in files, and the thread that reads files again when they change."""

from __future__ import annotations

import hmac
import logging
import os
import stat
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

MAX_TOKEN_BYTES = 4096
REFRESH_SECONDS = 1.0

_log = logging.getLogger(__name__)


class TokenFile:
    """The token in a file: its only line, without the white space around it.

    While the file has no valid token, no token matches. Comparing a token never touches the disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = b""
        self._version: tuple[int, ...] | None = None
        self.error = ""
        """Why the file has no valid token; empty if it has one. Any thread may read it."""

    def read(self) -> bytes:
        """Return the token that the file has now. May block on the disk.

        Raises OSError if the file cannot be read. Raises ValueError if the file does not contain a token, or every user
        may read it.
        """
        with self.path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            text = file.read(MAX_TOKEN_BYTES + 1)
        if mode & stat.S_IROTH:
            raise ValueError("every user may read the file; expected mode 0600, or 0640 for a group")
        token = text.strip()
        if not token:
            raise ValueError("the file is empty")
        if len(text) > MAX_TOKEN_BYTES or b"\n" in token or b"\0" in token:
            raise ValueError(f"expected one line of at most {MAX_TOKEN_BYTES} bytes in the file")
        return token

    def matches(self, presented: bytes) -> bool:
        """Return whether this is the token. The comparison takes constant time."""
        return bool(self._token) and hmac.compare_digest(presented, self._token)

    def refresh(self) -> None:
        """Read the file if it changed. May block on the disk."""
        # The version is older than the content if the file changes in between; the next refresh then reads it again.
        version = file_version(self.path)
        if self._token and version == self._version:
            return
        fields = {"file": str(self.path)}
        try:
            self._token = self.read()
        except (OSError, ValueError) as error:
            # Closed, rather than open with the previous token, which may have been revoked by the removal.
            self._token = b""
            if not self.error:
                fields["error"] = str(error)
                _log.error("no valid token in the token file: its routes are closed", extra={"fields": fields})
            reason = (isinstance(error, OSError) and error.strerror) or str(error)
            self.error = f"{self.path.name}: {reason}"
            return
        if self.error or self._version is not None:
            _log.info("token replaced", extra={"fields": fields})
        self._version, self.error = version, ""


class FileRefresher:
    """Refreshes files once a second.

    Each function reads its files if they changed; it may block on the disk, and must not raise.
    """

    def __init__(self, refreshes: Sequence[Callable[[], None]]) -> None:
        self._refreshes = refreshes
        self._stopped = threading.Event()

    def start(self) -> None:
        """Read the files, then refresh them until `stop`."""
        for refresh in self._refreshes:
            refresh()
        if self._refreshes:
            # A daemon of its own, so that a hung mount delays neither requests nor the exit.
            threading.Thread(target=self._run, name="gpumem-files", daemon=True).start()

    def stop(self) -> None:
        """End the thread; does not wait for it."""
        self._stopped.set()

    def _run(self) -> None:
        while not self._stopped.wait(REFRESH_SECONDS):
            for refresh in self._refreshes:
                refresh()


def file_version(path: Path) -> tuple[int, ...] | None:
    """Return what differs after a change of the file; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    # With the inode: a mounted Kubernetes secret is replaced, not written.
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode
