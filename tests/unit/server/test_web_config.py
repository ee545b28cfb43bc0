from __future__ import annotations

import importlib.util
import shutil
import ssl
import subprocess
from pathlib import Path

import bcrypt
import pytest
import trustme
import yaml

from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.server.settings import load_settings
from gpumem_exporter.server.web_access import WebAccess
from gpumem_exporter.server.web_config import read_web_config
from tests.support.certificates import issue, trust
from tests.support.paths import REPOSITORY

EXAMPLE = REPOSITORY / "deploy" / "web-config.example.yml"
HASH = bcrypt.hashpw(b"secret", bcrypt.gensalt(4)).decode()
TLS = "tls_server_config: {cert_file: tls.crt, key_file: tls.key"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def folder(tmp_path: Path, authority: trustme.CA) -> Path:
    """Where a certificate and its key lie."""
    issue(authority, tmp_path)
    trust(authority, tmp_path)
    return tmp_path


def refusal(folder: Path, text: str) -> str:
    """Why `serve` does not start with this file; without the file's own name."""
    path = folder / "web.yml"
    path.write_text(text)
    with pytest.raises(ConfigurationError) as refused:
        load_settings({"web.config.file": str(path)}, {})
    message = str(refused.value)
    assert "\n" not in message
    assert message.startswith(str(path))
    return message.removeprefix(str(path))


def test_paths_are_from_the_files_own_folder(tmp_path: Path) -> None:
    (tmp_path / "web.yml").write_text("tls_server_config: {cert_file: a/tls.crt, key_file: /k/tls.key}\n")
    tls = read_web_config(tmp_path / "web.yml").tls
    assert tls is not None
    assert (tls.cert_file, tls.key_file) == (tmp_path / "a" / "tls.crt", Path("/k/tls.key"))
    assert (tls.min_version, tls.max_version, tls.client_auth_type) == ("TLS12", "TLS13", "NoClientCert")


def test_each_setting_of_tls_is_one_of_the_context(folder: Path) -> None:
    (folder / "web.yml").write_text(
        TLS + ", min_version: TLS13, client_auth_type: VerifyClientCertIfGiven, client_ca_file: authority.crt}\n"
    )
    context = WebAccess(folder / "web.yml").context
    assert context is not None
    assert context.minimum_version == context.maximum_version == ssl.TLSVersion.TLSv1_3
    assert context.verify_mode == ssl.CERT_OPTIONAL
    assert len(context.get_ca_certs()) == 1


@pytest.mark.parametrize("text", ["{}", f"basic_auth_users: {{ada: {HASH}}}"])
def test_without_certificates_there_is_no_tls(tmp_path: Path, text: str) -> None:
    (tmp_path / "web.yml").write_text(text)
    assert WebAccess(tmp_path / "web.yml").context is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", ": it is empty; expected tls_server_config or basic_auth_users, or {} for neither"),
        ("- x\n", ":1: the file: expected keys with values; the keys are tls_server_config, basic_auth_users"),
        ("{}\n---\n{}\n", ":2: not YAML"),
        ("\ntls_config: {}\n", ":2: the file: unknown key 'tls_config'; the keys are tls_server_config, basic_auth_u"),
        ("http_server_config: {}\n", ":1: the file: http_server_config is not supported by this exporter; it takes"),
        ("rate_limit: {}\n", ":1: the file: rate_limit is not supported"),
        ("tls_server_config:\n", ":1: the file: tls_server_config has no value"),
        ("tls_server_config: x\n", ":1: tls_server_config: expected keys with values; the keys are cert_file, key_"),
        ("tls_server_config: {key_file: k}\n", ":1: tls_server_config: the key 'cert_file' is missing"),
        (TLS + ",\n cipher_suites: [x]}\n", ":2: tls_server_config: cipher_suites is not supported by this exporter"),
        (TLS + ",\n min_verson: TLS12}\n", ":2: tls_server_config: unknown key 'min_verson'; the keys are cert_file"),
        (TLS + ", min_version: TLS11}", "min_version: 'TLS11' is not right: expected TLS12, TLS13"),
        (TLS + ", min_version: TLS13, max_version: TLS12}", "tls_server_config: no version is from TLS13 to TLS12"),
        (
            TLS + ", client_auth_type: RequestClientCert}",
            "'RequestClientCert' is not right: expected NoClientCert, Ver",
        ),
        (TLS + ", client_auth_type: RequireAndVerifyClientCert}", "needs client_ca_file, whom to believe"),
        (TLS + ", client_ca_file: authority.crt}", "client_ca_file is for client_auth_type VerifyClientCertIfGiven or"),
        ("basic_auth_users: {}", ":1: basic_auth_users: expected names with the bcrypt hash of each password"),
        (f"basic_auth_users: {{ada: {HASH},\n ada: {HASH}}}", ":2: basic_auth_users: the name 'ada' is there twice"),
        (f"basic_auth_users: {{'a:b': {HASH}}}", ":1: basic_auth_users: expected a name without a colon"),
        ("basic_auth_users: {ada: [x]}", "'ada': expected the password's bcrypt hash"),
        (f"basic_auth_users: {{ada: {HASH.replace('$04$', '$31$')}}}", "of a cost from 4 to 15, as `htpasswd -nBC 10"),
    ],
)
def test_what_is_not_right_is_told_with_its_line(folder: Path, text: str, said: str) -> None:
    assert said in refusal(folder, text)


def test_a_password_in_the_place_of_its_hash_is_not_shown(tmp_path: Path) -> None:
    message = refusal(tmp_path, "basic_auth_users:\n  ada: hunter2\n")
    assert message.startswith(":2: basic_auth_users: 'ada': expected the password's bcrypt hash")
    assert "hunter2" not in message


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ({"tls.crt": None}, "cert_file '{}/tls.crt': No such file or directory"),
        ({"tls.crt": b"x"}, "cert_file '{}/tls.crt': expected a certificate in PEM"),
        ({"tls.key": None}, "key_file '{}/tls.key': No such file or directory"),
        ({"tls.key": b"x"}, "key_file '{}/tls.key': expected a private key in PEM"),
        ({"tls.key": b"-----BEGIN ENCRYPTED PRIVATE KEY-----"}, "it is encrypted; expected a key without a passphrase"),
        ({"tls.key": b"-----BEGIN PRIVATE KEY-----"}, "do not go together"),
        ({"authority.crt": None}, "client_ca_file '{}/authority.crt': No such file or directory"),
        ({"authority.crt": b"-----BEGIN CERTIFICATE-----\n"}, "client_ca_file '{}/authority.crt': "),
    ],
)
def test_a_file_of_the_certificate_that_is_not_right_is_named(
    folder: Path, broken: dict[str, bytes | None], said: str
) -> None:
    for name, content in broken.items():
        if content is None:
            (folder / name).unlink()
        else:
            (folder / name).write_bytes(content)
    text = TLS + ", client_auth_type: RequireAndVerifyClientCert, client_ca_file: authority.crt}"
    message = refusal(folder, text)
    assert message.startswith(":1: tls_server_config: ")
    assert said.format(folder) in message


def test_the_key_of_another_certificate_is_not_taken(folder: Path, authority: trustme.CA) -> None:
    issue(authority, folder, "other")
    message = refusal(folder, "tls_server_config: {cert_file: tls.crt, key_file: other.key}")
    assert message.endswith("do not go together: key values mismatch")


def test_users_without_the_package_that_they_need_are_refused_with_the_mend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    message = refusal(tmp_path, f"basic_auth_users: {{ada: {HASH}}}")
    assert message.endswith("needs the package bcrypt: pip install 'gpumem-exporter[web]'")


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"web configuration file '.*none' cannot be read: No such file"):
        load_settings({"web.config.file": str(tmp_path / "none")}, {})


def test_the_example_is_taken_here_and_by_prometheus(folder: Path) -> None:
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    shutil.copy(EXAMPLE, folder / "web.yml")
    access = WebAccess(folder / "web.yml")
    assert access.context is not None
    assert len(access.users) == 1
    checked = subprocess.run([promtool, "check", "web-config", folder / "web.yml"], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr


def test_the_examples_keys_that_are_left_out_are_keys(folder: Path) -> None:
    shutil.copy(folder / "authority.crt", folder / "clients.crt")
    lines = EXAMPLE.read_text().replace("  # client_", "  client_")
    (folder / "web.yml").write_text(lines)
    assert set(yaml.safe_load(lines)["tls_server_config"]) > {"client_auth_type", "client_ca_file"}
    context = WebAccess(folder / "web.yml").context
    assert context is not None
    assert context.verify_mode == ssl.CERT_REQUIRED
