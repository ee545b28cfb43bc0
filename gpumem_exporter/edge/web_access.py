"""The certificate, the users and the headers of the TCP addresses, from `--web.config.file`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.users import Users
from gpumem_exporter.edge.watched_files import WatchedFiles
from gpumem_exporter.edge.web_config import WebConfig, read_web_config

_log = logging.getLogger(__name__)


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
