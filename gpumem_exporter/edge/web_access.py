"""The certificate, the users and the headers of the TCP addresses, from `--web.config.file`."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hmac
import logging
import secrets
import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.connections import Owner
from gpumem_exporter.edge.fair_queue import Turns
from gpumem_exporter.edge.problems import ProblemCode, ProblemError
from gpumem_exporter.edge.watched_files import WatchedFiles
from gpumem_exporter.edge.web_config import WebConfig, read_web_config

UNKNOWN_USER = b"$2b$10$" + b"." * 53
"""What the password of an unknown user is compared with, at the usual cost, so that it takes about as long."""
_CHALLENGE_BASIC = {"WWW-Authenticate": 'Basic realm="gpumem-exporter", charset="UTF-8"'}
# The reply to a wrong token. With a Basic challenge, a browser would show its password dialog.
_CHALLENGE_BEARER = {"WWW-Authenticate": 'Bearer realm="gpumem-exporter"'}
# The part of a password that bcrypt uses; from version 5 on it raises for a longer one.
_MAX_PASSWORD_BYTES = 72

_log = logging.getLogger(__name__)


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
        code, reason = ProblemCode.PASSWORD_REQUIRED, "basic authentication with a name and a password is required"
        challenge = _CHALLENGE_BASIC
        if scheme.lower() == b"bearer":
            code, reason = ProblemCode.WRONG_TOKEN, "the token does not open this route: send another one or a password"
            challenge = _CHALLENGE_BEARER
        elif scheme.lower() == b"basic":
            code, reason = ProblemCode.WRONG_PASSWORD, "wrong name or password"
            with contextlib.suppress(binascii.Error):
                if await self.admit(base64.b64decode(encoded.strip(), validate=True), owner):
                    return
        raise ProblemError(code, f"{reason}; the users are in the exporter's --web.config.file", challenge)

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


class WebAccess:
    """The web configuration in force. Used on the event loop only, except `refresh`.

    The constructor reads the file, the certificate and the key. Raises ConfigurationError if one of them is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        config, self._certificate = _read(path)
        self._not_reloaded = ""
        self._reading = asyncio.Lock()
        self.users = Users(config.basic_auth_users)
        """The users of the TCP addresses; empty if every client may use them."""
        self.headers = _headers(config)

    def tls(self) -> ssl.SSLContext | None:
        """Return the context for a new connection; None without TLS."""
        return self._certificate.value if self._certificate is not None else None

    async def reload_on_hangup(self) -> None:
        """Read the file, the certificate and the key again. An invalid file changes nothing.

        Open connections keep their certificate.
        """
        async with self._reading:
            try:
                config, certificate = await asyncio.to_thread(self._read_again)
            except ConfigurationError as error:
                self._not_reloaded = "the web configuration is invalid, the previous one stays in force: see the log"
                _log.error("web configuration not reloaded: %s", error)
                return
            self._not_reloaded = ""
            self.users, self._certificate = Users(config.basic_auth_users), certificate
            fields = {"file": str(self._path), "tls": str(certificate is not None).lower(), "users": len(self.users)}
            _log.info("web configuration reloaded", extra={"fields": fields})

    def _read_again(self) -> tuple[WebConfig, WatchedFiles[ssl.SSLContext] | None]:
        config, certificate = _read(self._path)
        # A mistake in the file would otherwise let clients send their passwords without encryption.
        if (certificate is None) != (self._certificate is None) or _headers(config) != self.headers:
            raise ConfigurationError(f"{self._path}: TLS on or off and other headers need a restart")
        return config, certificate

    def refresh(self) -> None:
        """Read the certificate, the key and the client authorities again if their files changed. In any thread."""
        # The web configuration itself is read only on SIGHUP: half of a file could be a valid one without users.
        if (certificate := self._certificate) is not None:
            certificate.refresh()

    def error(self) -> str:
        """Return what an operator has to fix: invalid files; empty if nothing."""
        if self._certificate is not None and self._certificate.error:
            return "the new certificate is invalid, the previous one stays in force: see the log"
        return self._not_reloaded


def _read(path: Path) -> tuple[WebConfig, WatchedFiles[ssl.SSLContext] | None]:
    config = read_web_config(path)
    tls = config.tls_server_config
    return config, None if tls is None else WatchedFiles(f"{path}: tls_server_config", tls.files.values(), tls.context)


def _headers(config: WebConfig) -> dict[str, str]:
    return config.http_server_config.headers.model_dump(by_alias=True, exclude_none=True)
