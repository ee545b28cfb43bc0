"""The web configuration: its file, its certificate, and its users."""

from __future__ import annotations

import asyncio
import errno
import importlib.util
import os
import re
import shutil
import ssl
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import bcrypt
import pytest

from gpumem_client.wire.errors import ConfigurationError
from gpumem_exporter.edge.problems import ProblemError
from gpumem_exporter.edge.web_access import UNKNOWN_USER, Users, WebAccess
from tests.support.builders.certificates import authority, folder
from tests.support.paths import REPOSITORY

__all__ = ["authority", "folder"]

EXAMPLE = REPOSITORY / "deploy" / "web-config.example.yml"
HASH = "$2b$04$abcdefghijklmnopqrstuu2r9OfJnfCsdneAXAGHnS4UpFFP8WIrW"
"""Of `secret`; a constant, since it is part of test ids."""
TLS = "tls_server_config: {cert_file: tls.crt, key_file: tls.key"
ADA = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
BOB = bcrypt.hashpw("pässword".encode(), bcrypt.gensalt(5)).decode().replace("$2b$", "$2y$")


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


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bytes, bytes]]:
    """The calls of bcrypt."""
    calls: list[tuple[bytes, bytes]] = []
    real: Callable[[bytes, bytes], bool] = bcrypt.checkpw

    def check(password: bytes, hashed: bytes) -> bool:
        assert threading.current_thread() is not threading.main_thread()
        calls.append((password, hashed))
        return real(password, hashed)

    monkeypatch.setattr(bcrypt, "checkpw", check)
    return calls


def admitted(users: Users, *credentials: bytes) -> list[bool]:
    async def ask() -> list[bool]:
        return [await users.admit(each, "a") for each in credentials]

    return asyncio.run(ask())


@pytest.mark.parametrize(
    ("credentials", "right"),
    [
        (b"ada:secret", True),
        ("bob:pässword".encode(), True),
        (b"ada:secret ", False),
        (b"ada:", False),
        (b"ada", False),
        (b"", False),
        (b":secret", False),
        (b"eve:secret", False),
        ("ada:pässword".encode(), False),
        (b"ada:sec\0ret", False),
        (b"ada:" + b"x" * 100, False),
        (b"\xff\xfe:secret", False),
    ],
)
def test_only_a_name_with_its_own_password_is_admitted(credentials: bytes, right: bool) -> None:
    assert admitted(Users({"ada": ADA, "bob": BOB}), credentials) == [right]


def test_right_credentials_are_verified_once_and_wrong_ones_each_time(
    checks: list[tuple[bytes, bytes]],
) -> None:
    users = Users({"ada": ADA})
    assert admitted(users, b"ada:secret", b"ada:secret", b"ada:wrong", b"ada:wrong") == [True, True, False, False]
    assert [password for password, _ in checks] == [b"secret", b"wrong", b"wrong"]


@pytest.mark.parametrize("credentials", [b"ada:wrong", b"eve:secret", b"eve:", b""])
def test_an_unknown_name_costs_one_hash_as_a_known_one(checks: list[tuple[bytes, bytes]], credentials: bytes) -> None:
    assert admitted(Users({"ada": ADA}), credentials) == [False]
    ((_, hashed),) = checks
    assert hashed == (ADA.encode() if credentials.startswith(b"ada:") else UNKNOWN_USER)


async def test_simultaneous_connections_are_verified_once(checks: list[tuple[bytes, bytes]]) -> None:
    users = Users({"ada": ADA})
    assert await asyncio.gather(*(users.admit(b"ada:secret", "a") for _ in range(50))) == [True] * 50
    assert len(checks) == 1


async def test_who_guesses_passwords_delays_and_refuses_no_login_of_another(
    checks: list[tuple[bytes, bytes]],
) -> None:
    users = Users({"ada": ADA})
    guesses = [asyncio.ensure_future(users.admit(b"ada:%d" % number, "guesser")) for number in range(100)]
    await asyncio.sleep(0)
    assert await users.admit(b"ada:secret", "ada")
    assert len(checks) <= 3
    outcomes = await asyncio.gather(*guesses, return_exceptions=True)
    refused = [each for each in outcomes if isinstance(each, ProblemError)]
    assert [each for each in outcomes if each not in refused] == [False] * (100 - len(refused))
    assert {each.status for each in refused} == {503}
