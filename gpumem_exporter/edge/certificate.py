"""A certificate and its key in files, as a context of TLS."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.watched_files import WatchedFiles
from gpumem_exporter.edge.web_config import Tls

_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}


def watched_certificate(tls: Tls, where: str) -> WatchedFiles[ssl.SSLContext]:
    """Return the context for new connections, of the last valid files; open connections keep theirs.

    Raises ConfigurationError, which starts with `where`, if a file is missing or invalid.
    """
    files = {"cert_file": tls.cert_file, "key_file": tls.key_file}
    if tls.client_ca_file is not None:
        files["client_ca_file"] = tls.client_ca_file
    return WatchedFiles(where, files.values(), partial(_context, tls, files))


def _context(tls: Tls, files: Mapping[str, Path]) -> ssl.SSLContext:
    for key, path in files.items():
        _check_file(key, path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3 if tls.min_version == "TLS13" else ssl.TLSVersion.TLSv1_2
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(["http/1.1"])
    try:
        # Without a password, OpenSSL would ask for one on the terminal.
        context.load_cert_chain(tls.cert_file, tls.key_file, password="")
    except OSError as error:
        names = f"the certificate of cert_file '{tls.cert_file}' and the key of key_file '{tls.key_file}'"
        raise ConfigurationError(f"{names} do not match: {_reason(error)}") from None
    if tls.client_ca_file is not None:
        try:
            context.load_verify_locations(tls.client_ca_file)
        except OSError as error:
            raise ConfigurationError(f"client_ca_file '{tls.client_ca_file}': {_reason(error)}") from None
        # A resumed session skips the verification, but a session belongs to its context: after an authority was
        # removed, there is another.
        context.verify_mode = _CLIENT_CERTIFICATE[tls.client_auth_type]
    return context


def _check_file(key: str, path: Path) -> None:
    """Raise ConfigurationError with the file that is wrong: OpenSSL's errors name no file."""
    reason = ""
    try:
        content = path.read_bytes()
    except OSError as error:
        reason = error.strerror or str(error)
    else:
        if key != "key_file" and b"-----BEGIN CERTIFICATE-----" not in content:
            reason = "expected a certificate in PEM"
        if key == "key_file" and (b"PRIVATE KEY-----" not in content or b"ENCRYPTED" in content):
            reason = "expected a private key in PEM, without a passphrase"
    if reason:
        raise ConfigurationError(f"{key} '{path}': {reason}")


def _reason(error: OSError) -> str:
    """Return the reason of OpenSSL, such as KEY_VALUES_MISMATCH, in lower case."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return " ".join(reason.replace("_", " ").lower().split())
