"""Reads the file of `--web.config.file`: the web configuration of Prometheus' exporter-toolkit.

Its format is https://prometheus.io/docs/prometheus/latest/configuration/https/. Settings of that format that this
exporter does not support are errors.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpumem_exporter.core.yaml_file import YamlReader, is_mapping, is_scalar, line_of
from gpumem_exporter.server.security.cipher_suites import TLS12_SUITES, TLS13_SUITES

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["ClientAuthType", "Pem", "Tls", "Version", "WebConfig", "read_web_config"]

ClientAuthType = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]
Version = Literal["TLS12", "TLS13"]

_CLIENT_AUTH_TYPES: tuple[ClientAuthType, ...] = (
    "NoClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
)
_VERSIONS: tuple[Version, ...] = ("TLS12", "TLS13")

_KEYS = ("tls_server_config", "basic_auth_users", "http_server_config")
_KEYS_UNSUPPORTED = ("rate_limit",)
_TLS_KEYS = (
    *("cert_file", "key_file", "cert", "key", "min_version", "max_version"),
    *("client_auth_type", "client_ca_file", "client_ca", "client_allowed_sans"),
    *("cipher_suites", "prefer_server_cipher_suites"),
)
_TLS_KEYS_UNSUPPORTED = ("curve_preferences",)
_HEADERS: Mapping[str, tuple[str, ...]] = {
    "Content-Security-Policy": (),
    "Strict-Transport-Security": (),
    "X-Content-Type-Options": ("nosniff",),
    "X-Frame-Options": ("deny", "sameorigin"),
    "X-XSS-Protection": (),
}
"""The headers that can be set, and their permitted values; none if every value is permitted."""

_HASH = re.compile(r"\$2[aby]\$(?P<cost>\d\d)\$[./A-Za-z0-9]{53}")
_COSTS = range(4, 16)
"""bcrypt permits 4 to 31. Each step doubles the time; at 15, one login takes seconds."""


@dataclass(frozen=True, slots=True)
class Pem:
    """Certificates or a key in PEM."""

    key: str
    """Its key in the web configuration, such as `cert` or `cert_file`."""
    source: Path | bytes = field(repr=False)
    """The file, or the text in the web configuration itself."""

    def __str__(self) -> str:
        return f"{self.key} {str(self.source)!r}" if isinstance(self.source, Path) else self.key


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings of the TCP addresses."""

    cert: Pem
    key: Pem
    min_version: Version
    max_version: Version
    client_auth_type: ClientAuthType
    client_ca: Pem | None
    client_allowed_sans: tuple[str, ...]
    """Empty: every verified certificate is allowed."""
    cipher_suites: tuple[str, ...]
    """Go's names, in the order of preference; empty for OpenSSL's default."""
    prefer_server_cipher_suites: bool
    where: str = field(compare=False)
    """File and line, for messages."""

    @property
    def files(self) -> tuple[Path, ...]:
        """The files with certificates and the key."""
        pems = (self.cert, self.key, self.client_ca)
        return tuple(pem.source for pem in pems if pem is not None and isinstance(pem.source, Path))


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The content of the file."""

    tls: Tls | None
    headers: Mapping[str, str]
    """Headers of every reply."""
    users: Mapping[str, bytes] = field(repr=False)
    """bcrypt hashes by name."""


def read_web_config(path: Path) -> WebConfig:
    """Read the file, without the files that it refers to. May block on the disk.

    Raises:
        ConfigurationError: one line with the file, the line, the error and the accepted values.
    """
    return _Reader(path, "web configuration file").web_config()


class _Reader(YamlReader):
    def web_config(self) -> WebConfig:
        root = self.root(f"{' or '.join(_KEYS)}, or {{}} for none of them")
        given = self._known(root, "the file", _KEYS, _KEYS_UNSUPPORTED)
        return WebConfig(
            tls=self._tls(given["tls_server_config"]) if "tls_server_config" in given else None,
            headers=self._headers(given["http_server_config"]) if "http_server_config" in given else {},
            users=self._users(given["basic_auth_users"]) if "basic_auth_users" in given else {},
        )

    def _known(self, node: Node, what: str, keys: Sequence[str], unsupported: Sequence[str]) -> dict[str, Node]:
        """Return the values of a mapping. Keys that only Prometheus' exporters support have their own error."""
        for key, _ in node.value if is_mapping(node) else ():
            if is_scalar(key) and key.value in unsupported:
                self.fail(key, f"{what}: {key.value} is not supported by this exporter; it takes {', '.join(keys)}")
        return self.mapping(node, keys, what=what)

    def _tls(self, node: Node) -> Tls:
        what = "tls_server_config"
        given = self._known(node, what, _TLS_KEYS, _TLS_KEYS_UNSUPPORTED)
        versions = {
            key: self.choice(given[key], f"{what}: {key}", _VERSIONS) if key in given else default
            for key, default in (("min_version", "TLS12"), ("max_version", "TLS13"))
        }
        if versions["min_version"] > versions["max_version"]:
            self.fail(given["max_version"], f"{what}: min_version TLS13 is greater than max_version TLS12")
        auth_type, client_ca = self._client_auth(given)
        return Tls(
            cert=self._required_pem(node, given, "cert"),
            key=self._required_pem(node, given, "key"),
            min_version=versions["min_version"],  # type: ignore[arg-type]  # `choice` has checked these
            max_version=versions["max_version"],  # type: ignore[arg-type]
            client_auth_type=auth_type,
            client_ca=client_ca,
            client_allowed_sans=self._texts(given, "client_allowed_sans"),
            cipher_suites=self._cipher_suites(given, versions["min_version"]),
            prefer_server_cipher_suites=self.flag(given, "prefer_server_cipher_suites", default=True),
            where=f"{self._path}:{line_of(node)}: {what}",
        )

    def _client_auth(self, given: Mapping[str, Node]) -> tuple[ClientAuthType, Pem | None]:
        what = "tls_server_config"
        auth_type: ClientAuthType = "NoClientCert"
        if "client_auth_type" in given:
            auth_type = self.choice(  # type: ignore[assignment]
                given["client_auth_type"], f"{what}: client_auth_type", _CLIENT_AUTH_TYPES
            )
        client_ca = self._pem(given, "client_ca")
        if auth_type != "NoClientCert" and client_ca is None:
            self.fail(
                given["client_auth_type"],
                f"{what}: client_auth_type {auth_type} needs client_ca_file or client_ca",
            )
        for key in ("client_ca_file", "client_ca", "client_allowed_sans"):
            if auth_type == "NoClientCert" and key in given:
                wanted = " or ".join(_CLIENT_AUTH_TYPES[1:])
                self.fail(given[key], f"{what}: {key} is for client_auth_type {wanted}")
        return auth_type, client_ca

    def _cipher_suites(self, given: Mapping[str, Node], min_version: str) -> tuple[str, ...]:
        what = "tls_server_config: cipher_suites"
        suites = self._texts(given, "cipher_suites", (*TLS12_SUITES, *TLS13_SUITES))
        if suites and min_version == "TLS12" and TLS12_SUITES.keys().isdisjoint(suites):
            self.fail(given["cipher_suites"], f"{what}: none of them is for TLS 1.2; add one, or set min_version TLS13")
        return suites

    def _texts(self, given: Mapping[str, Node], key: str, choices: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the values of a list; () if it is absent."""
        what = f"tls_server_config: {key}"
        if key not in given:
            return ()
        items = self.sequence(given[key], what)
        if not items:
            self.fail(given[key], f"{what}: the list is empty")
        return tuple(self.choice(item, what, choices) if choices else self.text(item, what) for item in items)

    def _required_pem(self, node: Node, given: Mapping[str, Node], name: str) -> Pem:
        pem = self._pem(given, name)
        if pem is None:
            self.fail(node, f"tls_server_config: the key '{name}_file' or '{name}' is missing")
        return pem

    def _pem(self, given: Mapping[str, Node], name: str) -> Pem | None:
        """Return the value of `NAME` or the file of `NAME_file`; None without both."""
        what, file = "tls_server_config", f"{name}_file"
        if name in given and file in given:
            self.fail(given[file], f"{what}: {name} and {file} exclude each other")
        if name in given:
            return Pem(name, self.text(given[name], f"{what}: {name}").encode())
        return Pem(file, self._file(given[file], file)) if file in given else None

    def _file(self, node: Node, key: str) -> Path:
        text = self.text(node, f"tls_server_config: {key}")
        if "\0" in text:
            self.fail(node, f"tls_server_config: {key}: expected the path of a file")
        return self._path.parent / text

    def _headers(self, node: Node) -> dict[str, str]:
        what = "http_server_config"
        given = self.mapping(node, ("http2", "headers"), what=what)
        # The exporter offers HTTP/1.1 only. A client that prefers HTTP/2 learns that in the handshake.
        self.flag(given, "http2", default=True)
        if "headers" not in given:
            return {}
        headers = {}
        for name, value in self.mapping(given["headers"], tuple(_HEADERS), what=f"{what}: headers").items():
            key, choices = f"{what}: headers: {name}", _HEADERS[name]
            text = self.choice(value, key, choices) if choices else self.text(value, key)
            if not (text.isascii() and text.isprintable()):
                self.fail(value, f"{key}: expected printable ASCII characters in one line")
            headers[name] = text
        return headers

    def _users(self, node: Node) -> dict[str, bytes]:
        what = "basic_auth_users"
        if not is_mapping(node) or not node.value:
            self.fail(node, f"{what}: expected names with the bcrypt hash of each password")
        users: dict[str, bytes] = {}
        for key, value in node.value:
            name = str(key.value) if is_scalar(key) else ""
            if not name or ":" in name or not name.isprintable():
                self.fail(key, f"{what}: expected a name without a colon")
            if name in users:
                self.fail(key, f"{what}: the name {name[:64]!r} is repeated")
            found = _HASH.fullmatch(value.value) if is_scalar(value) else None
            if found is None or int(found["cost"]) not in _COSTS:
                # The value is not shown, because it may be the password itself.
                self.fail(
                    value,
                    f"{what}: {name[:64]!r}: expected the password's bcrypt hash of a cost from {_COSTS[0]} to "
                    f"{_COSTS[-1]}, as `htpasswd -nBC 10 NAME` prints it",
                )
            users[name] = found[0].encode()
        if importlib.util.find_spec("bcrypt") is None:
            self.fail(node, f"{what}: needs the Python package bcrypt: pip install bcrypt")
        return users
