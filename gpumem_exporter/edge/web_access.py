"""The certificate, the users and the headers of the TCP addresses, from `--web.config.file`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Iterator
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.certificate import Certificate
from gpumem_exporter.edge.users import Users
from gpumem_exporter.edge.web_config import WebConfig, read_web_config

_log = logging.getLogger(__name__)


class WebAccess:
    """The web configuration in force. Used on the event loop only, except `refresh`.

    The constructor reads the file, the certificate and the key. Raises ConfigurationError if one of them is invalid.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._config, self._certificate = _read(path)
        self._not_reloaded = ""
        self._reading = asyncio.Lock()
        self.users = Users(self._config.basic_auth_users)
        """The users of the TCP addresses; empty if every client may use them."""
        self.headers = self._config.http_server_config.headers
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
                self._not_reloaded = "the web configuration is invalid, the previous one stays in force: see the log"
                return
            self._not_reloaded = ""
            self.users = self.users.changed_to(config.basic_auth_users)
            self._config, self._certificate = config, certificate
            fields = {"file": str(self._path), "tls": str(certificate is not None).lower(), "users": len(self.users)}
            _log.info("web configuration reloaded", extra={"fields": fields})

    def with_headers(self, app: ASGIApp) -> ASGIApp:
        """Return an application that sets the headers on every reply, in place of headers with the same name."""
        configured = self._config.http_server_config.headers
        headers = {name.lower().encode(): value.encode() for name, value in configured.items()}

        async def application(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_with_headers(message: Message) -> None:
                if message["type"] == "http.response.start":
                    others = [(name, value) for name, value in message["headers"] if name.lower() not in headers]
                    message = {**message, "headers": [*others, *headers.items()]}
                await send(message)

            await app(scope, receive, send_with_headers)

        return application if headers else app

    def refresh(self) -> None:
        """Load the certificate, the key and the client authorities again if their files changed. For any thread."""
        # The web configuration itself is read only on SIGHUP: half of a file could be a valid one without users.
        certificate = self._certificate
        if certificate is not None:
            certificate.refresh()

    def error(self) -> str:
        """Return what an operator has to fix: invalid files, or a certificate that expires soon; empty if nothing."""
        return self._not_reloaded or (self._certificate.problem() if self._certificate is not None else "")

    def _use_certificate_in_force(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Use the last certificate that was read. Called in each TLS handshake, with or without SNI."""
        if self._certificate is not None:
            self._certificate.use_in(connection)


def _read(path: Path) -> tuple[WebConfig, Certificate | None]:
    config = read_web_config(path)
    tls = config.tls_server_config
    return config, None if tls is None else Certificate(tls, f"{path}: tls_server_config")


def _refuse_changes_that_need_a_restart(path: Path, before: WebConfig, now: WebConfig) -> None:
    """Raise ConfigurationError for changes that open listeners cannot take over."""
    # A handshake can use another certificate and other client authorities, but no other settings.
    if changed := list(_changes_of_listeners(before, now)):
        raise ConfigurationError(f"{path}: {' and '.join(changed)} changed, which needs a restart")


def _changes_of_listeners(before: WebConfig, now: WebConfig) -> Iterator[str]:
    if before.http_server_config != now.http_server_config:
        yield "http_server_config"
    old, new = before.tls_server_config, now.tls_server_config
    if old is None or new is None:
        if old is not new:
            yield "tls_server_config (TLS on or off)"
        return
    for name in ("min_version", "client_auth_type"):
        if getattr(old, name) != getattr(new, name):
            yield f"tls_server_config.{name}"
