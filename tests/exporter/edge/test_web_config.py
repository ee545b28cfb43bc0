from __future__ import annotations

import errno
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.web_access import WebAccess
from tests.support.builders.certificates import authority, folder
from tests.support.paths import REPOSITORY

__all__ = ["authority", "folder"]

EXAMPLE = REPOSITORY / "deploy" / "web-config.example.yml"
HASH = "$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"
"""Of `secret`; a constant, since it is part of test ids."""
TLS = "tls_server_config: {cert_file: tls.crt, key_file: tls.key"


def refusal(folder: Path, text: str) -> str:
    """The error for this file, without the name of the file."""
    path = folder / "web.yml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        WebAccess(path)
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_the_settings_are_applied(folder: Path) -> None:
    """A relative path is relative to the file."""
    (folder / "web.yml").write_text(
        f"basic_auth_users: {{ada: {HASH}}}\n"
        f"{TLS}, min_version: TLS13, client_auth_type: VerifyClientCertIfGiven,\n"
        f"  client_ca_file: {folder}/authority.crt}}\n"
    )
    access = WebAccess(folder / "web.yml")
    assert len(access.users) == 1
    context = access.tls()
    assert context is not None
    assert context.minimum_version == ssl.TLSVersion.TLSv1_3
    assert context.verify_mode == ssl.CERT_OPTIONAL
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", r":1: .*tls_server_config\b.*basic_auth_users"),
        ("- x\n", r":1: .*tls_server_config, http_server_config, basic_auth_users"),
        ("{}\n---\n{}\n", r":2: .*YAML"),
        ("\ntls_config: {}\n", r":2: .*'tls_config'.*tls_server_config, http_server_config"),
        ("http_server_config: {http2: maybe}", r":1: http_server_config.http2: 'maybe'.*true or false"),
        ("http_server_config:\n http3: true\n", r":2: http_server_config: .*'http3'.*http2, headers"),
        (
            "http_server_config: {headers:\n {Server: x}}",
            r":2: http_server_config.headers: .*'Server'.*X-Frame-Options",
        ),
        (
            "http_server_config: {headers: {X-Frame-Options: DENY}}",
            r":1: .*X-Frame-Options: 'DENY'.*'deny' or 'sameorigin'",
        ),
        ('http_server_config: {headers: {X-XSS-Protection: "0\\r\\nX: y"}}', r":1: .*X-XSS-Protection: .*ASCII"),
        ("tls_server_config:\n", r":1: tls_server_config: has no value"),
        ("tls_server_config: x\n", r":1: tls_server_config: .*cert_file, key_file"),
        ("tls_server_config: {key_file: k}\n", r":1: tls_server_config: .*'cert_file'"),
        (TLS + ", min_version: TLS11}", r"min_version: 'TLS11'.*'TLS12' or 'TLS13'"),
        (TLS + ",\n client_auth_type: RequireAndVerifyClientCert}", r":2: .*client_ca_file"),
        (TLS + ",\n client_ca_file: authority.crt}", r":2: .*client_auth_type\b.*RequireAndVerifyClientCert"),
        *(
            (f"{TLS},\n {key}: x}}\n", rf":2: tls_server_config: .*'{key}'.*cert_file, key_file")
            for key in ("client_ca", "client_allowed_sans", "cipher_suites")
        ),
        ("basic_auth_users: {}", r":1: basic_auth_users: .*bcrypt"),
        (f"basic_auth_users: {{ada: {HASH},\n ada: {HASH}}}", r":2: .*'ada'(?!.*bcrypt)"),
        (f"basic_auth_users: {{'a:b': {HASH}}}", r":1: basic_auth_users: .*colon"),
        ("basic_auth_users: {ada: [x]}", r":1: basic_auth_users.ada: .*string"),
        (f"basic_auth_users: {{ada: {HASH.replace('$04$', '$31$')}}}", r"'ada': .*\b4 to 15\b.*htpasswd -nBC 10"),
    ],
)
def test_an_error_has_its_line(folder: Path, text: str, named: str) -> None:
    assert re.search(named, refusal(folder, text))


def test_a_password_in_place_of_a_hash_is_not_shown(tmp_path: Path) -> None:
    message = refusal(tmp_path, "basic_auth_users:\n  ada: hunter2\n")
    assert re.match(":2: basic_auth_users: 'ada': .*bcrypt", message)
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"tls.crt": None}, ("cert_file '{}/tls.crt'", os.strerror(errno.ENOENT))),
        ({"tls.crt": b"x"}, ("cert_file '{}/tls.crt'", "certificate", "PEM")),
        ({"tls.key": None}, ("key_file '{}/tls.key'", os.strerror(errno.ENOENT))),
        ({"tls.key": b"x"}, ("key_file '{}/tls.key'", "private key", "PEM")),
        ({"tls.key": b"-----BEGIN ENCRYPTED PRIVATE KEY-----"}, ("key_file '{}/tls.key'", "passphrase")),
        ({"tls.key": b"-----BEGIN PRIVATE KEY-----"}, ("'{}/tls.crt'", "'{}/tls.key'")),
        ({"authority.crt": None}, ("client_ca_file '{}/authority.crt'", os.strerror(errno.ENOENT))),
        ({"authority.crt": b"-----BEGIN CERTIFICATE-----\n"}, ("client_ca_file '{}/authority.crt': ",)),
    ],
)
def test_an_invalid_certificate_or_key_file_is_named(
    folder: Path, broken: dict[str, bytes | None], named: tuple[str, ...]
) -> None:
    for name, content in broken.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    text = TLS + ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: authority.crt}"
    message = refusal(folder, text)
    assert message.startswith(": tls_server_config: ")
    assert [part for part in named if part.format(folder) not in message] == [], message
    assert message.count("_file '") == sum("'{}/" in part for part in named), "it names no file that is valid"


def test_users_without_bcrypt_are_refused_with_the_command_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refusal(tmp_path, f"basic_auth_users: {{ada: {HASH}}}")
    assert "pip install bcrypt" in message


@pytest.mark.tools
@pytest.mark.parametrize("everything", [False, True])
def test_the_example_is_valid_here_and_for_prometheus(folder: Path, everything: bool) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    shutil.copy(folder / "authority.crt", folder / "clients.crt")
    text = EXAMPLE.read_text()
    if everything:
        text = re.sub(r"^( *)# ( *(?:- \S+|[\w-]+:(?: \S+)?)$)", r"\1\2", text, flags=re.MULTILINE)
    (folder / "web.yml").write_text(text)
    access = WebAccess(folder / "web.yml")
    context = access.tls()
    assert context is not None
    assert len(access.users) == 1
    assert (context.verify_mode == ssl.CERT_REQUIRED) == everything
    assert (set(access.headers) == {"Strict-Transport-Security"}) == everything
    checked = subprocess.run([promtool, "check", "web-config", folder / "web.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
