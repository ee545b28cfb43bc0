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

if TYPE_CHECKING:
    from yaml.nodes import Node

__all__ = ["CLIENT_AUTH_TYPES", "VERSIONS", "ClientAuthType", "Tls", "Version", "WebConfig", "read_web_config"]

ClientAuthType = Literal["NoClientCert", "VerifyClientCertIfGiven", "RequireAndVerifyClientCert"]
Version = Literal["TLS12", "TLS13"]

CLIENT_AUTH_TYPES: tuple[ClientAuthType, ...] = (
    "NoClientCert",
    "VerifyClientCertIfGiven",
    "RequireAndVerifyClientCert",
)
VERSIONS: tuple[Version, ...] = ("TLS12", "TLS13")

_KEYS = ("tls_server_config", "basic_auth_users")
_KEYS_UNSUPPORTED = ("http_server_config", "rate_limit")
_TLS_KEYS = ("cert_file", "key_file", "min_version", "max_version", "client_auth_type", "client_ca_file")
_TLS_KEYS_UNSUPPORTED = (
    "cert",
    "key",
    "client_ca",
    "client_allowed_sans",
    "cipher_suites",
    "curve_preferences",
    "prefer_server_cipher_suites",
)

_HASH = re.compile(r"\$2[aby]\$(?P<cost>\d\d)\$[./A-Za-z0-9]{53}")
_COSTS = range(4, 16)
"""bcrypt permits 4 to 31. Each step doubles the time; at 15, one login takes seconds."""


@dataclass(frozen=True, slots=True)
class Tls:
    """The TLS settings of the TCP addresses."""

    cert_file: Path
    key_file: Path
    min_version: Version
    max_version: Version
    client_auth_type: ClientAuthType
    client_ca_file: Path | None
    where: str = field(compare=False)
    """File and line, for messages."""


@dataclass(frozen=True, slots=True)
class WebConfig:
    """The content of the file."""

    tls: Tls | None
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
        root = self.root(f"{' or '.join(_KEYS)}, or {{}} for neither")
        given = self._known(root, "the file", _KEYS, (), _KEYS_UNSUPPORTED)
        return WebConfig(
            tls=self._tls(given["tls_server_config"]) if "tls_server_config" in given else None,
            users=self._users(given["basic_auth_users"]) if "basic_auth_users" in given else {},
        )

    def _known(
        self, node: Node, what: str, keys: Sequence[str], required: Sequence[str], unsupported: Sequence[str]
    ) -> dict[str, Node]:
        """Return the values of a mapping. Keys that only Prometheus' exporters support have their own error."""
        for key, _ in node.value if is_mapping(node) else ():
            if is_scalar(key) and key.value in unsupported:
                self.fail(key, f"{what}: {key.value} is not supported by this exporter; it takes {', '.join(keys)}")
        return self.mapping(node, keys, required, what)

    def _tls(self, node: Node) -> Tls:
        what = "tls_server_config"
        given = self._known(node, what, _TLS_KEYS, ("cert_file", "key_file"), _TLS_KEYS_UNSUPPORTED)
        versions = {
            key: self.choice(given[key], f"{what}: {key}", VERSIONS) if key in given else default
            for key, default in (("min_version", "TLS12"), ("max_version", "TLS13"))
        }
        if versions["min_version"] > versions["max_version"]:
            self.fail(given["max_version"], f"{what}: min_version TLS13 is greater than max_version TLS12")
        auth_type = (
            self.choice(given["client_auth_type"], f"{what}: client_auth_type", CLIENT_AUTH_TYPES)
            if "client_auth_type" in given
            else "NoClientCert"
        )
        if auth_type == "NoClientCert" and "client_ca_file" in given:
            wanted = " or ".join(CLIENT_AUTH_TYPES[1:])
            self.fail(given["client_ca_file"], f"{what}: client_ca_file is for client_auth_type {wanted}")
        if auth_type != "NoClientCert" and "client_ca_file" not in given:
            self.fail(given["client_auth_type"], f"{what}: client_auth_type {auth_type} needs client_ca_file")
        return Tls(
            cert_file=self._file(given["cert_file"], "cert_file"),
            key_file=self._file(given["key_file"], "key_file"),
            min_version=versions["min_version"],  # type: ignore[arg-type]  # `choice` has checked these
            max_version=versions["max_version"],  # type: ignore[arg-type]
            client_auth_type=auth_type,  # type: ignore[arg-type]
            client_ca_file=self._file(given["client_ca_file"], "client_ca_file") if "client_ca_file" in given else None,
            where=f"{self._path}:{line_of(node)}: {what}",
        )

    def _file(self, node: Node, key: str) -> Path:
        text = self.text(node, f"tls_server_config: {key}")
        if "\0" in text:
            self.fail(node, f"tls_server_config: {key}: expected the path of a file")
        return self._path.parent / text

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
            self.fail(node, f"{what}: needs the package bcrypt: pip install 'gpumem-exporter[web]'")
        return users
