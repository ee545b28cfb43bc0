"""The certificate and the users of the TCP addresses, from `--web.config.file`."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.server.security.password_users import Users
from gpumem_exporter.server.security.web_config import Tls, WebConfig, read_web_config

__all__ = ["WebAccess"]

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

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
                _refuse_changes_that_need_a_restart(self._path, self._config.tls, config.tls)
            except ConfigurationError as error:
                _log.error(
                    "web configuration not reloaded, the previous one stays in force",
                    extra={"fields": {"error": str(error)}},
                )
                return
            self.users = self.users.changed_to(config.users)
            self._config, self._in_force = config, context
            fields = {"file": str(self._path), "tls": str(context is not None).lower(), "users": len(self.users)}
            _log.info("web configuration reloaded", extra={"fields": fields})

    def _use_certificate_in_force(
        self, connection: ssl.SSLObject | ssl.SSLSocket, _name: str | None, _context: ssl.SSLContext
    ) -> None:
        """Use the last certificate that was read. Called in each TLS handshake, with or without SNI."""
        if self._in_force is not None and connection.context is not self._in_force:
            connection.context = self._in_force


def _read(path: Path) -> tuple[WebConfig, ssl.SSLContext | None]:
    config = read_web_config(path)
    return config, None if config.tls is None else _tls_context(config.tls)


def _refuse_changes_that_need_a_restart(path: Path, before: Tls | None, now: Tls | None) -> None:
    """Raise ConfigurationError for changes other than the certificate: a handshake can use only another certificate."""
    if (before is None) != (now is None):
        raise ConfigurationError(f"{path}: turning TLS on or off needs a restart")
    if before is None or now is None:
        return
    for key in ("min_version", "max_version", "client_auth_type", "client_ca_file"):
        if getattr(before, key) != getattr(now, key):
            raise ConfigurationError(f"{now.where}: changing {key} needs a restart")


def _tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a context with the certificate and the key. May block on the disk.

    Raises:
        ConfigurationError: a file cannot be read or is invalid; one line with the name of the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    context.maximum_version = _VERSIONS[tls.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _read_pem(tls, "cert_file", tls.cert_file, b"-----BEGIN CERTIFICATE-----", "a certificate in PEM")
    key = _read_pem(tls, "key_file", tls.key_file, b"PRIVATE KEY-----", "a private key in PEM")
    if b"ENCRYPTED" in key:
        raise _wrong(tls, "key_file", tls.key_file, "it is encrypted; expected a key without a passphrase")
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
    except OSError as error:
        raise ConfigurationError(
            f"{tls.where}: the certificate of cert_file {str(tls.cert_file)!r} and the key of key_file "
            f"{str(tls.key_file)!r} do not match: {_reason(error)}"
        ) from None
    if tls.client_ca_file is not None:
        path = tls.client_ca_file
        _read_pem(tls, "client_ca_file", path, b"-----BEGIN CERTIFICATE-----", "certificates in PEM")
        try:
            context.load_verify_locations(path)
        except OSError as error:
            raise _wrong(tls, "client_ca_file", path, _reason(error)) from None
        context.verify_mode = _CLIENT_CERTIFICATE[tls.client_auth_type]
    return context


def _read_pem(tls: Tls, key: str, path: Path, mark: bytes, expected: str) -> bytes:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise _wrong(tls, key, path, f"{error.strerror}") from None
    if mark not in content:
        raise _wrong(tls, key, path, f"expected {expected}")
    return content


def _wrong(tls: Tls, key: str, path: Path, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{tls.where}: {key} {str(path)!r}: {reason}")


def _reason(error: OSError) -> str:
    """Return the reason of OpenSSL, such as KEY_VALUES_MISMATCH, in lower case."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return " ".join(reason.replace("_", " ").lower().split())
