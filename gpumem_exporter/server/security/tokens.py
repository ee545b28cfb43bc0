"""Tokens in files, read anew when the file changes, so that a secret is rotated without a restart."""

from __future__ import annotations

import hmac
import logging
from pathlib import Path

__all__ = ["MAX_TOKEN_BYTES", "TokenFile"]

MAX_TOKEN_BYTES = 4096

_log = logging.getLogger(__name__)


class TokenFile:
    """The token in a file: its one line, without the white space around it. For one thread.

    The file is looked at with one `stat` a comparison and read again when size, time or inode differ (a mounted
    Kubernetes secret is replaced, not written). While it cannot be read, the last token that could be stays in force.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = b""
        self._seen: tuple[int, int, int] | None = None
        self._unreadable = False

    def read(self) -> bytes:
        """Read the token now.

        Raises:
            OSError: the file cannot be read.
            ValueError: it holds no token.
        """
        status = self.path.stat()
        with self.path.open("rb") as file:
            text = file.read(MAX_TOKEN_BYTES + 1)
        token = text.strip()
        if not token:
            raise ValueError("the file is empty")
        if len(text) > MAX_TOKEN_BYTES or b"\n" in token or b"\0" in token:
            raise ValueError(f"the file holds more than one line of at most {MAX_TOKEN_BYTES} bytes")
        self._token = token
        self._seen = (status.st_mtime_ns, status.st_size, status.st_ino)
        return token

    def matches(self, presented: bytes) -> bool:
        """Whether this is the token, compared in a time that does not tell how much of it was right."""
        self._refresh()
        return bool(self._token) and hmac.compare_digest(presented, self._token)

    def _refresh(self) -> None:
        try:
            status = self.path.stat()
            if self._seen != (status.st_mtime_ns, status.st_size, status.st_ino):
                rotated = self._seen is not None
                self.read()
                if rotated:
                    _log.info("token replaced", extra={"fields": {"file": str(self.path)}})
            self._unreadable = False
        except (OSError, ValueError) as error:
            if not self._unreadable:
                _log.warning(
                    "token file cannot be read, the last token stays in force",
                    extra={"fields": {"file": str(self.path), "error": str(error)}},
                )
            self._unreadable = True
