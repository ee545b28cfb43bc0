"""The certificate and the users of the TCP addresses, from `--web.config.file`."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.server.security.file_refresher import file_version
from gpumem_exporter.server.security.password_users import Users
from gpumem_exporter.server.security.tls_context import create_context
from gpumem_exporter.server.security.web_config import Tls, WebConfig, read_web_config

__all__ = ["WebAccess"]

_log = logging.getLogger(__name__)


class WebAccess:
    """The web configuration in force. Used on the event loop only, except `refresh`.

    Args:
        path: the file; read by the constructor, with the certificate and the key.

    Raises:
        ConfigurationError: one of the files is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config, self._certificate = _read(path)
        self._reading = asyncio.Lock()
        self.users = Users(self._config.users)
        """The users of the TCP addresses; empty if every client may use them."""
        self.headers = self._config.headers
        """Headers of every reply."""
        self.context = self._certificate.context if self._certificate is not None else None
        """The context to listen with; None without TLS. Each handshake uses the certificate in force."""
        if self.context is not None:
            self.context.sni_callback = self._use_certificate_in_force

    async def reload_on_hangup(self) -> None:
        """Read the file, the certificate and the key again. An invalid file changes nothing.

        Open connections keep their certificate.
        """
        async with self._reading:
            try:
                config, certificate = await asyncio.to_thread(_read, self._path)
                _refuse_changes_that_need_a_restart(self._path, self._config, config)
            except ConfigurationError as error:
                _log.error(
                    "web configuration not reloaded, the previous one stays in force",
                    extra={"fields": {"error": str(error)}},
                )
                return
            self.users = self.users.changed_to(config.users)
            self._config, self._certificate = config, certificate
            fields = {"file": str(self._path), "tls": str(certificate is not None).lower(), "users": len(self.users)}
            _log.info("web configuration reloaded", extra={"fields": fields})

    def refresh(self) -> None:
        """Load the certificate, the key and the client authorities again if their files changed. Any thread may call.

        The web configuration itself is read only on SIGHUP: half of a file could be a valid one without users.
        """
        certificate = self._certificate
        if certificate is not None:
            certificate.refresh()

    def admits(self, certificate: Mapping[str, Any]) -> bool:
        """Return whether `client_allowed_sans` permits a client with this verified certificate.

        Args:
            certificate: as `ssl.SSLSocket.getpeercert()` returns it.
        """
        tls = self._config.tls
        if tls is None or not tls.client_allowed_sans:
            return True
        names = _alternative_names(certificate)
        if not names.isdisjoint(tls.client_allowed_sans):
            return True
        _log.warning(
            "connection closed: client_allowed_sans has no name of the client's certificate",
            extra={"fields": {"names": ",".join(sorted(names))}},
        )
        return False

    def _use_certificate_in_force(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Use the last certificate that was read. Called in each TLS handshake, with or without SNI."""
        if self._certificate is not None and connection.context is not self._certificate.context:
            connection.context = self._certificate.context


class _Certificate:
    """A context with the certificate, the key and the client authorities of a configuration.

    Raises:
        ConfigurationError: one of the files is invalid.
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        # The version is older than the content if a file changes in between; the next refresh then reads it again.
        self._versions = self._current_versions()
        self.context = create_context(tls)

    def refresh(self) -> None:
        """Create the context again if a file changed. Invalid files change nothing and are logged once."""
        versions = self._current_versions()
        if versions == self._versions:
            return
        self._versions = versions
        try:
            self.context = create_context(self._tls)
        except ConfigurationError as error:
            _log.error(
                "certificate not replaced, the previous one stays in force", extra={"fields": {"error": str(error)}}
            )
        else:
            _log.info("certificate replaced", extra={"fields": {"certificate": str(self._tls.cert)}})

    def _current_versions(self) -> list[tuple[int, ...] | None]:
        versions: list[tuple[int, ...] | None] = []
        for path in self._tls.files:
            try:
                versions.append(file_version(path.stat()))
            except OSError:
                versions.append(None)
        return versions


def _read(path: Path) -> tuple[WebConfig, _Certificate | None]:
    config = read_web_config(path)
    return config, None if config.tls is None else _Certificate(config.tls)


def _refuse_changes_that_need_a_restart(path: Path, before: WebConfig, now: WebConfig) -> None:
    """Raise ConfigurationError for changes that open listeners cannot take over.

    A handshake can use another certificate and other client authorities, but no other settings.
    """
    if before.headers != now.headers:
        raise ConfigurationError(f"{path}: changing http_server_config needs a restart")
    if (before.tls is None) != (now.tls is None):
        raise ConfigurationError(f"{path}: turning TLS on or off needs a restart")
    if before.tls is None or now.tls is None:
        return
    for key in ("min_version", "max_version", "client_auth_type", "cipher_suites", "prefer_server_cipher_suites"):
        if getattr(before.tls, key) != getattr(now.tls, key):
            raise ConfigurationError(f"{now.tls.where}: changing {key} needs a restart")


def _alternative_names(certificate: Mapping[str, Any]) -> set[str]:
    """Return the DNS names, IP addresses, e-mail addresses and URIs of a certificate, as Go writes them."""
    return {
        str(ipaddress.ip_address(value.strip())) if kind == "IP Address" else value
        for kind, value in certificate.get("subjectAltName", ())
        if kind in ("DNS", "IP Address", "email", "URI")
    }
