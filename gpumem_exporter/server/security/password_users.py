"""The users of basic authentication: who they are is what bcrypt says, and bcrypt is slow on purpose."""

from __future__ import annotations

import asyncio
import hmac
import secrets
from collections.abc import Mapping

from gpumem_exporter.server.http.problems import ProblemError

__all__ = ["MAX_WAITING", "Users"]

MAX_WAITING = 64
"""Logins that wait for their turn; whoever tries passwords by the thousand takes no more of the machine than one."""

_MAX_REMEMBERED = 1024
_MAX_PASSWORD_BYTES = 72
"""What bcrypt looks at of a password."""


class Users:
    """Some users. For the event loop; bcrypt runs in a thread, one login at a time.

    What bcrypt has let in is remembered as a keyed hash, so that a scraper pays once. What it has not is not, and an
    unknown name costs what a known one does.

    Args:
        hashes: bcrypt hashes by name.
    """

    def __init__(self, hashes: Mapping[str, bytes]) -> None:
        self._hashes = dict(hashes)
        self._slowest = max(self._hashes.values(), key=lambda hashed: hashed[4:6], default=b"")
        self._key = secrets.token_bytes(32)
        self._remembered: set[bytes] = set()
        self._turn = asyncio.Lock()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._hashes)

    async def admit(self, credentials: bytes) -> bool:
        """Whether `name:password` is of one of the users.

        Raises:
            ProblemError: 503, too many others wait to be told.
        """
        seal = hmac.digest(self._key, credentials, "sha256")
        if seal in self._remembered:
            return True
        if self._waiting >= MAX_WAITING:
            raise ProblemError(503, "too many logins are being checked", {"Retry-After": "1"})
        self._waiting += 1
        try:
            async with self._turn:
                # Several connections of one scraper may have waited for the first of them.
                if seal in self._remembered:
                    return True
                admitted = await asyncio.to_thread(self._check, credentials)
        finally:
            self._waiting -= 1
        if admitted:
            if len(self._remembered) >= _MAX_REMEMBERED:
                self._remembered.clear()
            self._remembered.add(seal)
        return admitted

    def _check(self, credentials: bytes) -> bool:
        import bcrypt  # only whoever has users pays for it

        name, _, password = credentials.partition(b":")
        known = self._hashes.get(name.decode("utf-8", "replace"))
        try:
            right = bcrypt.checkpw(password[:_MAX_PASSWORD_BYTES], known or self._slowest)
        except ValueError:
            return False  # a password that is none, such as one with a zero byte in it
        return right and known is not None
