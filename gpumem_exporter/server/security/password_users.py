"""The users of basic authentication, whose passwords bcrypt verifies slowly on purpose."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Mapping

from gpumem_exporter.server.http.problems import ProblemError

__all__ = ["MAX_WAITING", "Users"]

MAX_WAITING = 64
"""The number of logins that may wait. One is verified at a time, so that guessing passwords uses one CPU at most."""

_MAX_REMEMBERED = 1024
_MAX_PASSWORD_BYTES = 72
"""The part of a password that bcrypt uses."""


class Users:
    """The users. Used on the event loop only; bcrypt runs in a thread, one login at a time.

    Verified credentials are remembered as a keyed hash, so that a scraper waits for bcrypt only once. An unknown name
    takes as long to verify as a known one.

    Args:
        hashes: bcrypt hashes by name.
    """

    def __init__(self, hashes: Mapping[str, bytes]) -> None:
        self._hashes = dict(hashes)
        self._slowest = max(self._hashes.values(), key=lambda hashed: hashed[4:6], default=b"")
        self._key = secrets.token_bytes(32)
        self._remembered: set[bytes] = set()
        self._lock = asyncio.Lock()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._hashes)

    async def admit(self, credentials: bytes) -> bool:
        """Return whether `name:password` belongs to one of the users.

        Raises:
            ProblemError: 503, too many logins wait.
        """
        digest = hmac.digest(self._key, credentials, "sha256")
        if digest in self._remembered:
            return True
        if self._waiting >= MAX_WAITING:
            raise ProblemError(503, "too many logins are being verified", {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._lock:
                # Another connection with the same credentials may have been verified meanwhile.
                if digest in self._remembered:
                    return True
                admitted = await asyncio.to_thread(self._check, credentials)
        finally:
            self._waiting -= 1
        if admitted:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered.add(digest)
        return admitted

    def _check(self, credentials: bytes) -> bool:
        import bcrypt

        name, _, password = credentials.partition(b":")
        known = self._hashes.get(name.decode("utf-8", "replace"))
        try:
            right = bcrypt.checkpw(password[:_MAX_PASSWORD_BYTES], known or self._slowest)
        except ValueError:
            return False  # for example, the password has a zero byte
        return right and known is not None
