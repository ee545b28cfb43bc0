"""The TLS context of the TCP addresses."""

from __future__ import annotations

import ssl
from pathlib import Path

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.server.security.web_config import Tls

__all__ = ["tls_context"]

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


def tls_context(tls: Tls) -> ssl.SSLContext:
    """Return a context with the certificate and the key. May block on the disk.

    Raises:
        ConfigurationError: a file cannot be read or is invalid; one line with the name of the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    context.maximum_version = _VERSIONS[tls.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    _require(tls, "cert_file", tls.cert_file, b"-----BEGIN CERTIFICATE-----", "a certificate in PEM")
    key = _require(tls, "key_file", tls.key_file, b"PRIVATE KEY-----", "a private key in PEM")
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
        _require(tls, "client_ca_file", path, b"-----BEGIN CERTIFICATE-----", "certificates in PEM")
        try:
            context.load_verify_locations(path)
        except OSError as error:
            raise _wrong(tls, "client_ca_file", path, _reason(error)) from None
        context.verify_mode = _CLIENT_CERTIFICATE[tls.client_auth_type]
    return context


def _require(tls: Tls, key: str, path: Path, mark: bytes, expected: str) -> bytes:
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
