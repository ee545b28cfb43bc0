"""Tokens in files."""

from __future__ import annotations

import hmac
import logging
import os
import stat
from pathlib import Path

from gpumem_exporter.server.security.file_refresher import file_version

__all__ = ["MAX_TOKEN_BYTES", "TokenFile"]

MAX_TOKEN_BYTES = 4096

_log = logging.getLogger(__name__)


class TokenFile:
    """The token in a file: its only line, without the white space around it.

    `refresh` reads the file again if it changed. While the file has no valid token, no token matches. Comparing a token
    never touches the disk.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._token = b""
        self._seen: tuple[int, ...] | None = None
        self._unreadable = False

    def read(self) -> bytes:
        """Read the token now. May block on the disk.

        Raises:
            OSError: the file cannot be read.
            ValueError: the file does not contain a token, or every user may read it.
        """
        with self.path.open("rb") as file:
            status = os.fstat(file.fileno())
            text = file.read(MAX_TOKEN_BYTES + 1)
        if status.st_mode & stat.S_IROTH:
            raise ValueError("every user may read the file; expected mode 0600, or 0640 for a group")
        token = text.strip()
        if not token:
            raise ValueError("the file is empty")
        if len(text) > MAX_TOKEN_BYTES or b"\n" in token or b"\0" in token:
            raise ValueError(f"expected one line of at most {MAX_TOKEN_BYTES} bytes in the file")
        self._token = token
        self._seen = file_version(status)
        return token

    def matches(self, presented: bytes) -> bool:
        """Return whether this is the token. The comparison takes constant time."""
        return bool(self._token) and hmac.compare_digest(presented, self._token)

    def refresh(self) -> None:
        """Read the file if it changed. May block on the disk."""
        try:
            status = self.path.stat()
            if self._seen != file_version(status):
                rotated = self._seen is not None or self._unreadable
                self.read()
                if rotated:
                    _log.info("token replaced", extra={"fields": {"file": str(self.path)}})
            self._unreadable = False
        except (OSError, ValueError) as error:
            self._token, self._seen = b"", None
            if not self._unreadable:
                _log.error(
                    "no valid token in the token file: its routes are closed",
                    extra={"fields": {"file": str(self.path), "error": str(error)}},
                )
            self._unreadable = True
