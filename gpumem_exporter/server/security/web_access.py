"""The certificate, the users and the headers of the TCP addresses, from `--web.config.file`."""

from __future__ import annotations

import asyncio
import logging
import re
import ssl
import time
from datetime import datetime, timezone
from pathlib import Path

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.server.security.tokens import file_version
from gpumem_exporter.server.security.users import Users
from gpumem_exporter.server.security.web_config import Tls, WebConfig, read_web_config

_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

# In DER, the validity of a certificate is a sequence of two times.
_TIME = rb"(?:\x17\x0d(?:\d{12})Z|\x18\x0f(?:\d{14})Z)"
_VALIDITY = re.compile(rb"\x30[\x1e-\x22](" + _TIME + rb")(" + _TIME + rb")")
_EXPIRES_SOON_SECONDS = 7 * 86400.0
_EXPIRES_SOON_SHARE = 1 / 6
"""A certificate of a few days is usually renewed when a third of its time is left."""

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
        """Return an application that sets the headers on every reply, in place of those with the same name."""
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
        """Load the certificate, the key and the client authorities again if their files changed. Any thread may call.

        The web configuration itself is read only on SIGHUP: half of a file could be a valid one without users.
        """
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
        if self._certificate is not None and connection.context is not self._certificate.context:
            connection.context = self._certificate.context


class _Certificate:
    """A TLS context of the files of a configuration."""

    def __init__(self, path: Path, tls: Tls) -> None:
        self._where = f"{path}: tls_server_config"
        self._tls = tls
        self._files = {"cert_file": tls.cert_file, "key_file": tls.key_file}
        if tls.client_ca_file is not None:
            self._files["client_ca_file"] = tls.client_ca_file
        # The version is older than the content if a file changes in between; the next refresh then reads it again.
        self._versions = self._current_versions()
        self._not_replaced = ""
        self._validity: tuple[float, float] | None = None
        self.context = self._create_context()

    def refresh(self) -> None:
        """Create the context again if a file changed. Invalid files change nothing and are logged once."""
        versions = self._current_versions()
        if versions == self._versions:
            return
        self._versions = versions
        try:
            self.context = self._create_context()
        except ConfigurationError as error:
            _log.error(
                "certificate not replaced, the previous one stays in force", extra={"fields": {"error": str(error)}}
            )
            self._not_replaced = "the new certificate is invalid, the previous one stays in force: see the log"
        else:
            self._not_replaced = ""
            _log.info("certificate replaced", extra={"fields": {"certificate": str(self._tls.cert_file)}})

    def problem(self) -> str:
        """Return why the certificate needs an operator; empty if it does not."""
        if self._not_replaced or self._validity is None:
            return self._not_replaced
        start, end = self._validity
        left = end - time.time()
        if left > min(_EXPIRES_SOON_SECONDS, _EXPIRES_SOON_SHARE * (end - start)):
            return ""
        return f"the certificate expires in {left / 3600:.0f} h" if left > 0 else "the certificate has expired"

    def _current_versions(self) -> list[tuple[int, ...] | None]:
        return [file_version(path) for path in self._files.values()]

    def _create_context(self) -> ssl.SSLContext:
        """Return a context; raise ConfigurationError if a file is missing or invalid."""
        tls = self._tls
        for key, path in self._files.items():
            self._check_file(key, path)
        self._validity = _validity(tls.cert_file)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if tls.min_version == "TLS13" else ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(tls.cert_file, tls.key_file, password="")
        except OSError as error:
            files = f"the certificate of cert_file '{tls.cert_file}' and the key of key_file '{tls.key_file}'"
            raise ConfigurationError(f"{self._where}: {files} do not match: {_reason(error)}") from None
        if tls.client_ca_file is not None:
            try:
                context.load_verify_locations(tls.client_ca_file)
            except OSError as error:
                raise self._invalid("client_ca_file", _reason(error)) from None
            context.verify_mode = _CLIENT_CERTIFICATE[tls.client_auth_type]
            # A resumed session skips the verification, also after its authority was removed. This turns off the
            # sessions of TLS 1.3; Python has no access to sessions of TLS 1.2.
            context.num_tickets = 0
        return context

    def _check_file(self, key: str, path: Path) -> None:
        """Name the file that is wrong: OpenSSL's errors name none."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise self._invalid(key, error.strerror or str(error)) from None
        if key != "key_file" and b"-----BEGIN CERTIFICATE-----" not in content:
            raise self._invalid(key, "expected a certificate in PEM")
        if key == "key_file" and (b"PRIVATE KEY-----" not in content or b"ENCRYPTED" in content):
            raise self._invalid(key, "expected a private key in PEM, without a passphrase")

    def _invalid(self, key: str, reason: str) -> ConfigurationError:
        return ConfigurationError(f"{self._where}: {key} '{self._files[key]}': {reason}")


def _read(path: Path) -> tuple[WebConfig, _Certificate | None]:
    config = read_web_config(path)
    tls = config.tls_server_config
    return config, None if tls is None else _Certificate(path, tls)


def _refuse_changes_that_need_a_restart(path: Path, before: WebConfig, now: WebConfig) -> None:
    """Raise ConfigurationError for changes that open listeners cannot take over.

    A handshake can use another certificate and other client authorities, but no other settings.
    """
    if before.http_server_config != now.http_server_config:
        raise ConfigurationError(f"{path}: changing http_server_config needs a restart")
    old, new = before.tls_server_config, now.tls_server_config
    if (old is None) != (new is None):
        raise ConfigurationError(f"{path}: turning TLS on or off needs a restart")
    for key in ("min_version", "client_auth_type"):
        if getattr(old, key, "") != getattr(new, key, ""):
            raise ConfigurationError(f"{path}: tls_server_config: changing {key} needs a restart")


def _validity(path: Path) -> tuple[float, float] | None:
    """Return start and end of the first certificate in a file in Unix seconds; None if they cannot be read.

    `ssl` reads them only of a peer's certificate.
    """
    _, begin, rest = path.read_text("ascii", "replace").partition("-----BEGIN CERTIFICATE-----")
    body, end, _ = rest.partition("-----END CERTIFICATE-----")
    try:
        found = _VALIDITY.search(ssl.PEM_cert_to_DER_cert(f"{begin}{body}{end}"))
        return None if found is None else (_unix_seconds(found[1]), _unix_seconds(found[2]))
    except ValueError:
        return None


def _unix_seconds(der: bytes) -> float:
    """Return the seconds of a UTCTime, whose century is this one, or of a GeneralizedTime."""
    text = der[2:-1].decode("ascii")
    digits = text if len(text) == 14 else f"20{text}"
    return datetime.strptime(digits, "%Y%m%d%H%M%S").replace(tzinfo=timezone.utc).timestamp()


def _reason(error: OSError) -> str:
    """Return the reason of OpenSSL, such as KEY_VALUES_MISMATCH, in lower case."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return " ".join(reason.replace("_", " ").lower().split())
