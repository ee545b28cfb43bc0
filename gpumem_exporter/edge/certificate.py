"""A certificate and its key in files, which are read again when they change."""

from __future__ import annotations

import logging
import ssl
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.tokens import file_version
from gpumem_exporter.edge.web_config import Tls

_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

_log = logging.getLogger(__name__)


class Certificate:
    """A TLS context of the files in `tls`. `where` starts each error message.

    The constructor reads the files. Raises ConfigurationError if one of them is missing or invalid.
    """

    def __init__(self, tls: Tls, where: str) -> None:
        self._where = where
        self._tls = tls
        self._files = {"cert_file": tls.cert_file, "key_file": tls.key_file}
        if tls.client_ca_file is not None:
            self._files["client_ca_file"] = tls.client_ca_file
        # The version is older than the content if a file changes in between; the next refresh then reads it again.
        self._versions = self._current_versions()
        self._context = self._create_context()
        self.error = ""
        """Why the files in force are older than the files on the disk; empty if they are not."""

    def in_force(self) -> ssl.SSLContext:
        """Return the context for a new connection: of the last valid files. Any thread."""
        return self._context

    def refresh(self) -> None:
        """Create the context again if a file changed. Invalid files change nothing and are logged once. Any thread.

        Open connections keep their certificate.
        """
        versions = self._current_versions()
        if versions == self._versions:
            return
        self._versions = versions
        try:
            self._context = self._create_context()
        except ConfigurationError as error:
            _log.error(
                "certificate not replaced, the previous one stays in force", extra={"fields": {"error": str(error)}}
            )
            self.error = "the new certificate is invalid, the previous one stays in force: see the log"
        else:
            self.error = ""
            _log.info("certificate replaced", extra={"fields": {"certificate": str(self._tls.cert_file)}})

    def _current_versions(self) -> list[tuple[int, ...] | None]:
        return [file_version(path) for path in self._files.values()]

    def _create_context(self) -> ssl.SSLContext:
        """Return a context; raise ConfigurationError if a file is missing or invalid."""
        tls = self._tls
        for key, path in self._files.items():
            self._check_file(key, path)
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
            # A resumed session skips the verification, but a session belongs to its context: after an authority was
            # removed, there is another.
            context.verify_mode = _CLIENT_CERTIFICATE[tls.client_auth_type]
        return context

    def _check_file(self, key: str, path: Path) -> None:
        """Raise ConfigurationError with the file that is wrong."""
        # OpenSSL's errors name no file.
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


def _reason(error: OSError) -> str:
    """Return the reason of OpenSSL, such as KEY_VALUES_MISMATCH, in lower case."""
    reason = getattr(error, "reason", None) or error.strerror or str(error)
    return " ".join(reason.replace("_", " ").lower().split())
