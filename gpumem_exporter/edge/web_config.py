"""Reads `--web.config.file`, the web configuration of Prometheus' exporter-toolkit, and the certificate that it names.

Its format is https://prometheus.io/docs/prometheus/latest/configuration/https/. Keys of that format that this exporter
does not support are errors.
"""

from __future__ import annotations

import importlib.util
import re
import ssl
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, ValidationInfo, field_validator, model_validator

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.core.yaml_file import FileSection, Flag, YamlFile, section_error

_CLIENT_CERTIFICATE = {
    "NoClientCert": ssl.CERT_NONE,
    "VerifyClientCertIfGiven": ssl.CERT_OPTIONAL,
    "RequireAndVerifyClientCert": ssl.CERT_REQUIRED,
}

_HASH = re.compile(r"\$2[aby]\$(?P<cost>\d\d)\$[./A-Za-z0-9]{53}")
# bcrypt permits 4 to 31. Each step doubles the time; at 15, one login takes seconds.
_COSTS = range(4, 16)


def _in_folder_of_file(value: Any, info: ValidationInfo[Path]) -> Path:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("expected the path of a file")
    return info.context / value


_File = Annotated[Path, BeforeValidator(_in_folder_of_file)]


class Tls(FileSection):
    """The certificate of the TCP addresses, and the certificates that clients need."""

    cert_file: _File
    key_file: _File
    min_version: Literal["TLS12", "TLS13"] = "TLS12"
    client_auth_type: Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"] = "NoClientCert"
    client_ca_file: _File | None = None

    @model_validator(mode="after")
    def _check_client_authority(self) -> Tls:
        if (self.client_ca_file is None) != (self.client_auth_type == "NoClientCert"):
            raise section_error(
                "client_auth_type" if self.client_ca_file is None else "client_ca_file",
                "client_auth_type VerifyClientCertIfGiven or RequireAndVerifyClientCert, and client_ca_file, need each "
                "other",
            )
        return self

    @property
    def files(self) -> dict[str, Path]:
        """The files by the key of each."""
        named = {"cert_file": self.cert_file, "key_file": self.key_file, "client_ca_file": self.client_ca_file}
        return {key: path for key, path in named.items() if path is not None}

    def context(self) -> ssl.SSLContext:
        """Return a context of what the files contain now. Raises ConfigurationError if one is missing or invalid."""
        for key, path in self.files.items():  # OpenSSL's errors name no file
            try:
                text = path.read_bytes()
            except OSError as error:
                raise ConfigurationError(f"{key} '{path}': {error.strerror}") from None
            if key != "key_file" and b" CERTIFICATE-----" not in text:
                raise ConfigurationError(f"{key} '{path}': expected a certificate in PEM")
            if key == "key_file" and (b"PRIVATE KEY-----" not in text or b"ENCRYPTED" in text):
                raise ConfigurationError(f"{key} '{path}': expected a private key in PEM, without a passphrase")
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3 if self.min_version == "TLS13" else ssl.TLSVersion.TLSv1_2
        context.options |= ssl.OP_NO_RENEGOTIATION
        context.set_alpn_protocols(["http/1.1"])
        subject = f"cert_file '{self.cert_file}' and key_file '{self.key_file}'"
        expected = "expected a certificate and its private key"
        try:
            # Without a password, OpenSSL would ask for one on the terminal.
            context.load_cert_chain(self.cert_file, self.key_file, password="")
            if self.client_ca_file is not None:
                subject, expected = f"client_ca_file '{self.client_ca_file}'", "expected certificates in PEM"
                context.load_verify_locations(self.client_ca_file)
        except OSError as error:
            reason = getattr(error, "reason", None)  # of OpenSSL, such as KEY_VALUES_MISMATCH
            because = f" ({reason.replace('_', ' ').lower()})" if reason else ""
            raise ConfigurationError(f"{subject}: {expected}{because}") from None
        # A resumed session skips the verification, but a session belongs to its context: after an authority was
        # removed, there is another.
        context.verify_mode = _CLIENT_CERTIFICATE[self.client_auth_type]
        return context


def _one_line(value: str) -> str:
    if not (value.isascii() and value.isprintable()):
        raise ValueError("expected printable ASCII characters in one line")
    return value


_Text = Annotated[str, AfterValidator(_one_line)]


class Headers(FileSection):
    """The headers of every reply that can be set."""

    content_security_policy: _Text | None = Field(default=None, alias="Content-Security-Policy")
    strict_transport_security: _Text | None = Field(default=None, alias="Strict-Transport-Security")
    x_content_type_options: Literal["nosniff"] | None = Field(default=None, alias="X-Content-Type-Options")
    x_frame_options: Literal["deny", "sameorigin"] | None = Field(default=None, alias="X-Frame-Options")
    x_xss_protection: _Text | None = Field(default=None, alias="X-XSS-Protection")


class HttpServer(FileSection):
    """What is true for every reply."""

    # The exporter offers HTTP/1.1 only. A client that prefers HTTP/2 learns that in the handshake.
    http2: Flag = True
    headers: Headers = Headers()


class WebConfig(FileSection):
    """The content of the file."""

    tls_server_config: Tls | None = None
    http_server_config: HttpServer = HttpServer()
    basic_auth_users: dict[str, str] = Field(default_factory=dict, repr=False)
    """bcrypt hashes by name."""

    @field_validator("basic_auth_users")
    @classmethod
    def _check_users(cls, users: dict[str, str]) -> dict[str, str]:
        if not users:
            raise section_error("", "expected names with the bcrypt hash of each password")
        for name, value in users.items():
            if not name or ":" in name or not name.isprintable():
                raise section_error(name, "expected a name without a colon")
            found = _HASH.fullmatch(value)
            if found is None or int(found["cost"]) not in _COSTS:
                # The value is not shown, because it may be the password itself.
                raise section_error(
                    name,
                    f"{name[:64]!r}: expected the password's bcrypt hash of a cost from {_COSTS[0]} to {_COSTS[-1]}, "
                    "as `htpasswd -nBC 10 NAME` prints it",
                )
        if importlib.util.find_spec("bcrypt") is None:
            raise section_error("", "needs the Python package bcrypt: pip install bcrypt")
        return users


def read_web_config(path: Path) -> WebConfig:
    """Read the file, without the files that it refers to. May block on the disk.

    Raises ConfigurationError with the file, the line, the error and the accepted values.
    """
    return YamlFile(path, "web configuration file").read(WebConfig, path.parent)
