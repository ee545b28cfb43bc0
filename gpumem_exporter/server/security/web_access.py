"""The certificate and the users of the TCP addresses, from `--web.config.file`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.server.security.password_users import Users
from gpumem_exporter.server.security.tls import tls_context
from gpumem_exporter.server.security.web_config import Tls, WebConfig, read_web_config

__all__ = ["WebAccess"]

_log = logging.getLogger(__name__)


class WebAccess:
    """The web configuration in force. Used on the event loop only.

    Args:
        path: the file; read by the constructor, with the certificate and the key.

    Raises:
        ConfigurationError: one of the files is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config, self._in_force = _read(path)
        self._reading = asyncio.Lock()
        self.users = Users(self._config.users)
        """The users of the TCP addresses; empty if every client may use them."""
        self.context = self._in_force
        """The context to listen with; None without TLS. Each handshake uses the certificate in force."""
        if self.context is not None:
            self.context.sni_callback = self._use_certificate_in_force

    async def reload_on_hangup(self) -> None:
        """Read the file, the certificate and the key again. An invalid file changes nothing.

        Open connections keep their certificate.
        """
        async with self._reading:
            try:
                config, context = await asyncio.to_thread(_read, self._path)
                _require_restartless(self._path, self._config.tls, config.tls)
            except ConfigurationError as error:
                _log.error(
                    "web configuration not reloaded, the previous one stays in force",
                    extra={"fields": {"error": str(error)}},
                )
                return
            if config.users != self._config.users:
                self.users = Users(config.users)
            self._config, self._in_force = config, context
            fields = {"file": str(self._path), "tls": str(context is not None).lower(), "users": len(self.users)}
            _log.info("web configuration reloaded", extra={"fields": fields})

    def _use_certificate_in_force(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Called in each handshake, also if the client names no server."""
        if self._in_force is not None and connection.context is not self._in_force:
            connection.context = self._in_force


def _read(path: Path) -> tuple[WebConfig, ssl.SSLContext | None]:
    config = read_web_config(path)
    return config, None if config.tls is None else tls_context(config.tls)


def _require_restartless(path: Path, before: Tls | None, now: Tls | None) -> None:
    """Refuse changes that need a restart: a handshake can only use another certificate."""
    if (before is None) != (now is None):
        raise ConfigurationError(f"{path}: turning TLS on or off needs a restart")
    if before is None or now is None:
        return
    for key in ("min_version", "max_version", "client_auth_type", "client_ca_file"):
        if getattr(before, key) != getattr(now, key):
            raise ConfigurationError(f"{now.where}: changing {key} needs a restart")
