"""A certificate and its key in files, which are read again when they change."""

from __future__ import annotations

import logging
import re
import ssl
import time
from datetime import datetime, timezone
from pathlib import Path

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.tokens import file_version
from gpumem_exporter.edge.web_config import Tls

_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

# In DER, the validity of a certificate is a sequence of two times.
_TIME = rb"(?:\x17\x0d(?:\d{12})Z|\x18\x0f(?:\d{14})Z)"
_VALIDITY = re.compile(rb"\x30[\x1e-\x22](" + _TIME + rb")(" + _TIME + rb")")
_EXPIRES_SOON_SECONDS = 7 * 86400.0
# A certificate of a few days is usually renewed when a third of its time is left.
_EXPIRES_SOON_SHARE = 1 / 6

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
        self._not_replaced = ""
        self._validity: tuple[float, float] | None = None
        self.context = self._create_context()

    def use_in(self, connection: ssl.SSLObject | ssl.SSLSocket) -> None:
        """Use the last valid certificate for a connection whose handshake has started with an earlier context."""
        if connection.context is not self.context:
            connection.context = self.context

    def refresh(self) -> None:
        """Create the context again if a file changed. Invalid files change nothing and are logged once. Any thread.

        Open connections keep their certificate.
        """
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


def _validity(path: Path) -> tuple[float, float] | None:
    """Return start and end of the first certificate in a file in Unix seconds; None if they cannot be read."""
    # By their form in DER: `ssl` reads the times only of a peer's certificate.
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
