"""Keeps what `--web.config.file` says in force: the certificate of the TCP addresses, and who may use them."""

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
    """The web configuration in force. For the event loop, once it is made.

    Args:
        path: the file; read at once, with the files that it names.

    Raises:
        ConfigurationError: one of them is not right.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config, self._in_force = _read(path)
        self._reading = asyncio.Lock()
        self.users = Users(self._config.users)
        """Who may use the TCP addresses; empty for everybody."""
        self.context = self._in_force
        """What to listen with; None without TLS. Stays the same: each handshake takes the certificate in force."""
        if self.context is not None:
            self.context.sni_callback = self._take_certificate_in_force

    async def reload_on_hangup(self) -> None:
        """Read the file, the certificate and the key again, for a SIGHUP. What is not right changes nothing.

        Connections that are open stay as they are.
        """
        async with self._reading:
            try:
                config, context = await asyncio.to_thread(_read, self._path)
                _require_same_terms(self._path, self._config.tls, config.tls)
            except ConfigurationError as error:
                _log.error(
                    "web configuration not reloaded, the one before stays in force",
                    extra={"fields": {"error": str(error)}},
                )
                return
            if config.users != self._config.users:
                self.users = Users(config.users)
            self._config, self._in_force = config, context
            fields = {"file": str(self._path), "tls": str(context is not None).lower(), "users": len(self.users)}
            _log.info("web configuration reloaded", extra={"fields": fields})

    def _take_certificate_in_force(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Called in each handshake, whether or not the client names a server."""
        if self._in_force is not None and connection.context is not self._in_force:
            connection.context = self._in_force


def _read(path: Path) -> tuple[WebConfig, ssl.SSLContext | None]:
    config = read_web_config(path)
    return config, None if config.tls is None else tls_context(config.tls)


def _require_same_terms(path: Path, before: Tls | None, now: Tls | None) -> None:
    """A handshake takes over another certificate, and no more."""
    if (before is None) != (now is None):
        raise ConfigurationError(f"{path}: TLS is turned on and off by a restart")
    if before is None or now is None:
        return
    for key in ("min_version", "max_version", "client_auth_type", "client_ca_file"):
        if getattr(before, key) != getattr(now, key):
            raise ConfigurationError(f"{now.where}: {key} is changed by a restart")
