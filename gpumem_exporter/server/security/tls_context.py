"""Creates the TLS context of `--web.config.file`."""

from __future__ import annotations

import contextlib
import os
import ssl
from collections.abc import Iterator
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.server.security.cipher_suites import TLS12_SUITES
from gpumem_exporter.server.security.web_config import Pem, Tls

__all__ = ["create_context"]

_VERSIONS = {"TLS12": ssl.TLSVersion.TLSv1_2, "TLS13": ssl.TLSVersion.TLSv1_3}
_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


def create_context(tls: Tls) -> ssl.SSLContext:
    """Return a context with the certificate and the key. May block on the disk.

    Raises:
        ConfigurationError: a certificate or the key cannot be read or is invalid; one line with the key and the file.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = _VERSIONS[tls.min_version]
    context.maximum_version = _VERSIONS[tls.max_version]
    context.options |= ssl.OP_NO_RENEGOTIATION
    if not tls.prefer_server_cipher_suites:
        context.options &= ~ssl.OP_CIPHER_SERVER_PREFERENCE
    context.set_alpn_protocols(["http/1.1"])
    _set_cipher_suites(context, tls)
    _load_certificate(context, tls)
    if tls.client_ca is not None:
        content = _read(tls, tls.client_ca, b"-----BEGIN CERTIFICATE-----", "certificates in PEM")
        try:
            with _in_memory(content) as path:
                context.load_verify_locations(path)
        except OSError as error:
            raise _invalid(tls, tls.client_ca, _reason(error)) from None
        context.verify_mode = _CLIENT_CERTIFICATE[tls.client_auth_type]
        # A resumed session skips the verification, also after its authority was removed. This turns off the sessions of
        # TLS 1.3; Python has no access to those of TLS 1.2.
        context.num_tickets = 0
    return context


def _set_cipher_suites(context: ssl.SSLContext, tls: Tls) -> None:
    suites = [TLS12_SUITES[suite] for suite in tls.cipher_suites if suite in TLS12_SUITES]
    if suites:
        try:
            context.set_ciphers(":".join(suites))
        except ssl.SSLError as error:
            raise ConfigurationError(
                f"{tls.where}: cipher_suites: OpenSSL permits none of them on this machine: {_reason(error)}"
            ) from None


def _load_certificate(context: ssl.SSLContext, tls: Tls) -> None:
    certificate = _read(tls, tls.cert, b"-----BEGIN CERTIFICATE-----", "a certificate in PEM")
    key = _read(tls, tls.key, b"PRIVATE KEY-----", "a private key in PEM")
    if b"ENCRYPTED" in key:
        raise _invalid(tls, tls.key, "it is encrypted; expected a key without a passphrase")
    try:
        with _in_memory(certificate) as certificate_path, _in_memory(key) as key_path:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(certificate_path, key_path, password="")
    except OSError as error:
        raise ConfigurationError(
            f"{tls.where}: the certificate of {tls.cert} and the key of {tls.key} do not match: {_reason(error)}"
        ) from None


def _read(tls: Tls, pem: Pem, mark: bytes, expected: str) -> bytes:
    try:
        content = pem.source.read_bytes() if isinstance(pem.source, Path) else pem.source
    except OSError as error:
        raise _invalid(tls, pem, f"{error.strerror}") from None
    if mark not in content:
        raise _invalid(tls, pem, f"expected {expected}")
    return content


@contextlib.contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """Yield the path of a file in memory: OpenSSL reads files, and a key of the configuration must not reach a disk."""
    with os.fdopen(os.memfd_create("gpumem-tls"), "wb") as file:
        file.write(content)
        file.flush()
        yield f"/proc/self/fd/{file.fileno()}"


def _invalid(tls: Tls, pem: Pem, reason: str) -> ConfigurationError:
    return ConfigurationError(f"{tls.where}: {pem}: {reason}")


def _reason(error: OSError) -> str:
    """Return the reason of OpenSSL, such as KEY_VALUES_MISMATCH, in lower case."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return " ".join(reason.replace("_", " ").lower().split())
