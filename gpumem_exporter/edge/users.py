"""The users of `--web.config.file`, whose passwords bcrypt verifies slowly on purpose."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import secrets
from collections.abc import Mapping

from gpumem_exporter.edge.problems import ProblemError

MAX_WAITING = 64
"""The number of logins that may wait. One is verified at a time, so that guessing passwords uses one CPU at most."""

_CHALLENGE_BASIC = {"WWW-Authenticate": 'Basic realm="gpumem-exporter", charset="UTF-8"'}
# The reply to a wrong token. With a Basic challenge, a browser would show its password dialog.
_CHALLENGE_BEARER = {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'}
_MAX_REMEMBERED = 1024
# The part of a password that bcrypt uses; from version 5 on it raises for a longer one.
_MAX_PASSWORD_BYTES = 72


class Users:
    """The users and their bcrypt hashes. Used on the event loop only; bcrypt runs in a thread, one login at a time."""

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = {name: hashed.encode() for name, hashed in hashes.items()}
        self._slowest = max(self._hashes.values(), key=_cost, default=b"")
        # Verified credentials are remembered as a keyed hash, so that a scraper waits for bcrypt only once.
        self._key = secrets.token_bytes(32)
        self._remembered: dict[bytes, str] = {}
        self._lock = asyncio.Lock()
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._hashes)

    def changed_to(self, hashes: Mapping[str, str]) -> Users:
        """Return the users of a reloaded file. Users with the same hash as before need no new verification."""
        users = Users(hashes)
        users._key = self._key
        users._remembered = {
            digest: name for digest, name in self._remembered.items() if users._hashes.get(name) == self._hashes[name]
        }
        return users

    async def authenticate(self, authorization: bytes) -> None:
        """Check the `Authorization` header of a request. Raises ProblemError: 401, or 503 if too many logins wait."""
        scheme, _, encoded = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            raise ProblemError(401, "the token does not open this route", _CHALLENGE_BEARER)
        reason = "basic authentication with a name and a password is required"
        if scheme.lower() == b"basic":
            if await self.admit(_decoded(encoded)):
                return
            reason = "wrong name or password"
        raise ProblemError(401, f"{reason}; the users are in the exporter's --web.config.file", _CHALLENGE_BASIC)

    async def admit(self, credentials: bytes) -> bool:
        """Return whether `name:password` belongs to one of the users.

        Raises ProblemError (503) if too many logins wait.
        """
        digest = hmac.digest(self._key, credentials, "sha256")
        if digest in self._remembered:
            return True
        # At cost 10 a login takes 0.06 s, so that a queue of this length takes four seconds.
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
            self._remembered[digest] = _name(credentials)
        return admitted

    def _check(self, credentials: bytes) -> bool:
        import bcrypt

        # Every name, known or not, takes as long to verify as the name with the slowest hash.
        known = self._hashes.get(_name(credentials))
        password = credentials.partition(b":")[2][:_MAX_PASSWORD_BYTES]
        hashed = known or self._slowest
        try:
            right = bcrypt.checkpw(password, hashed)
            # Each cost takes twice the time of the one before, so all checks together take as long as the slowest.
            for cost in range(_cost(hashed), _cost(self._slowest)):
                bcrypt.checkpw(password, b"%b%02d%b" % (hashed[:4], cost, hashed[6:]))
        except ValueError:
            return False  # for example, the password has a zero byte
        return right and known is not None


def _decoded(encoded: bytes) -> bytes:
    try:
        return base64.b64decode(encoded.strip(), validate=True)
    except binascii.Error:
        return b""


def _name(credentials: bytes) -> str:
    return credentials.partition(b":")[0].decode("utf-8", "replace")


def _cost(hashed: bytes) -> int:
    """Return the cost in `$2b$10$…`."""
    return int(hashed[4:6])
