"""Files that are read again when they change: tokens and certificates."""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from gpumem_client.wire.errors import ConfigurationError

MAX_TOKEN_BYTES = 4096
REFRESH_SECONDS = 1.0

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class WatchedFiles(Generic[Value]):
    """What some files contain. Used in any thread; the constructor and `refresh` may block on the disk.

    `read` raises ConfigurationError if a file is invalid. The constructor passes the error on, after `where`. Later,
    `value` stays what they contained before, until the files are valid again.
    """

    in_force_if_invalid = "what it contained before"

    def __init__(self, where: str, files: Iterable[Path], read: Callable[[], Value]) -> None:
        self._where = where
        self._files = tuple(files)
        self._read = read
        self.error = ""
        """Why the files are invalid; empty if they are valid."""
        # The version is older than the content if a file changes in between; the next refresh then reads it again.
        self._versions = self._current_versions()
        try:
            self.value = read()
        except ConfigurationError as error:
            raise ConfigurationError(f"{where}: {error}") from None

    def refresh(self) -> None:
        """Read the files again if one of them changed or is invalid. An error is logged once."""
        versions = self._current_versions()
        if versions == self._versions and not self.error:
            return
        self._versions = versions
        try:
            self.value = self._read()
        except ConfigurationError as error:
            # Before the log, which may block: the token of a removed file is no longer valid.
            before, self.error = self.error, str(error)
            if self.error != before:
                _log.error("%s: %s; %s is in force", self._where, error, self.in_force_if_invalid)
        else:
            self.error = ""
            _log.info("%s: read again", self._where)

    def _current_versions(self) -> list[tuple[int, ...] | None]:
        return [_version(path) for path in self._files]


def _version(path: Path) -> tuple[int, ...] | None:
    """Return what differs after a change of the file; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        return None
    # With the inode: a mounted Kubernetes secret is replaced, not written.
    return status.st_mtime_ns, status.st_size, status.st_ino, status.st_mode


class TokenFile(WatchedFiles[bytes]):
    """The token in a file that a flag names: its only line, without the white space around it.

    While the file has no valid token, no token matches: the previous one may have been revoked by its removal.
    """

    in_force_if_invalid = "nothing"

    def __init__(self, flag: str, path: Path) -> None:
        self.path = path
        super().__init__(f"{flag} {str(path)!r}", [path], self._token)

    def matches(self, presented: bytes) -> bool:
        """Return whether this is the token. The comparison takes constant time and never touches the disk."""
        return not self.error and hmac.compare_digest(presented, self.value)

    def _token(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                mode = os.fstat(file.fileno()).st_mode
                text = file.read(MAX_TOKEN_BYTES + 1)
        except (OSError, ValueError) as error:
            raise ConfigurationError((isinstance(error, OSError) and error.strerror) or str(error)) from None
        if mode & stat.S_IROTH:
            raise ConfigurationError("every user may read the file; expected mode 0600, or 0640 for a group")
        token = text.strip()
        if not token or len(text) > MAX_TOKEN_BYTES or b"\n" in token or b"\0" in token:
            raise ConfigurationError(f"expected one line of at most {MAX_TOKEN_BYTES} bytes in the file")
        return token


@contextlib.contextmanager
def refreshing(refreshes: Sequence[Callable[[], None]]) -> Iterator[None]:
    """Call the functions, which may block on the disk and must not raise, once a second until the block ends."""
    stopped = threading.Event()

    def run() -> None:
        while not stopped.wait(REFRESH_SECONDS):
            for refresh in refreshes:
                refresh()

    if refreshes:
        # A daemon of its own, so that a hung mount delays neither requests nor the exit.
        threading.Thread(target=run, name="gpumem-files", daemon=True).start()
    try:
        yield
    finally:
        stopped.set()
