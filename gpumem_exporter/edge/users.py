"""The users of `--web.config.file`, whose passwords bcrypt verifies slowly on purpose."""

from __future__ import annotations

import base64
import binascii
import contextlib
import hmac
import secrets
from collections.abc import Mapping
from functools import partial

from gpumem_exporter.edge.connections import Owner
from gpumem_exporter.edge.fair_queue import Turns
from gpumem_exporter.edge.problems import ProblemCode, ProblemError

UNKNOWN_USER = b"$2b$10$" + b"." * 53
"""What the password of an unknown user is compared with, at the usual cost, so that it takes about as long."""
_CHALLENGE_BASIC = {"WWW-Authenticate": 'Basic realm="gpumem-exporter", charset="UTF-8"'}
# The reply to a wrong token. With a Basic challenge, a browser would show its password dialog.
_CHALLENGE_BEARER = {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'}
# The part of a password that bcrypt uses; from version 5 on it raises for a longer one.
_MAX_PASSWORD_BYTES = 72


class Users:
    """The users and their bcrypt hashes. Used on the event loop only; bcrypt runs in a thread.

    One login is verified at a time, in turns of the owners of connections: guessing passwords uses one CPU at most.
    """

    def __init__(self, hashes: Mapping[str, str]) -> None:
        self._hashes = {name.encode(): hashed.encode() for name, hashed in hashes.items()}
        # Verified credentials are remembered as a keyed hash, so that a scraper waits for bcrypt only once.
        self._key = secrets.token_bytes(32)
        self._remembered: set[bytes] = set()
        self._logins = Turns(1)

    def __len__(self) -> int:
        return len(self._hashes)

    async def authenticate(self, authorization: bytes, owner: Owner) -> None:
        """Check the `Authorization` header of a request. Raises ProblemError: 401, or 503 if too many logins wait."""
        scheme, _, encoded = authorization.partition(b" ")
        if scheme.lower() == b"bearer":
            advice = "send the token of the exporter's --action.token-file, or a name and a password"
            raise ProblemError(
                ProblemCode.WRONG_TOKEN, f"the token does not open this route; {advice}", _CHALLENGE_BEARER
            )
        code, reason = ProblemCode.PASSWORD_REQUIRED, "basic authentication with a name and a password is required"
        if scheme.lower() == b"basic":
            code, reason = ProblemCode.WRONG_PASSWORD, "wrong name or password"
            with contextlib.suppress(binascii.Error):
                if await self.admit(base64.b64decode(encoded.strip(), validate=True), owner):
                    return
        raise ProblemError(code, f"{reason}; the users are in the exporter's --web.config.file", _CHALLENGE_BASIC)

    async def admit(self, credentials: bytes, owner: Owner) -> bool:
        """Return whether `name:password` belongs to one of the users.

        Raises ProblemError (503) if too many logins wait.
        """
        name, _, password = credentials.partition(b":")
        password = password[:_MAX_PASSWORD_BYTES]
        # So each user has one digest.
        digest = hmac.digest(self._key, name + b":" + password, "sha256")
        verify = partial(self._verify, name, password, digest)
        return digest in self._remembered or await self._logins.run(owner, verify)

    def _verify(self, name: bytes, password: bytes, digest: bytes) -> bool:
        import bcrypt

        # Another connection with the same credentials may have been verified meanwhile.
        if digest in self._remembered:
            return True
        known = self._hashes.get(name)
        try:
            right = bcrypt.checkpw(password, known or UNKNOWN_USER) and known is not None
        except ValueError:
            return False  # for example, the password has a zero byte
        if right:
            self._remembered.add(digest)
        return right
