from __future__ import annotations

import base64
import subprocess
import sys

import pytest

from gpumem_exporter.client._transport import Connection, shown_url
from gpumem_exporter.errors import ConfigurationError


def head(url: str, **headers: str) -> list[str]:
    """The lines of a request's head."""
    return Connection(url, timeout_seconds=1)._request("GET", "/", None, headers).decode().split("\r\n")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://node", ("node", 80)),
        ("https://node", ("node", 443)),
        ("https://node:9844/", ("node", 9844)),
        ("https://[::1]:9844", ("::1", 9844)),
        ("https://ada:secret@node:9844", ("node", 9844)),
        ("unix:///run/a@b.sock", "/run/a@b.sock"),
    ],
)
def test_a_url_says_where_the_exporter_is(url: str, address: object) -> None:
    assert Connection(url, timeout_seconds=1)._exporter.address == address


@pytest.mark.parametrize(
    "url", ["https://", "https://node/path", "https://node?x", "https://node:x", "unix://a@/s", "x"]
)
def test_what_is_no_exporters_url_is_refused_with_the_forms_that_there_are(url: str) -> None:
    with pytest.raises(ConfigurationError, match="expected http://host:port, https://host:port or unix:///path"):
        Connection(url, timeout_seconds=1)


def test_a_password_in_a_url_is_sent_and_neither_shown_nor_part_of_the_host() -> None:
    sent = head("https://ada:s%3Aecr%40t@node:1")
    assert "Host: node:1" in sent
    assert f"Authorization: Basic {base64.b64encode(b'ada:s:ecr@t').decode()}" in sent
    with pytest.raises(ConfigurationError) as refused:
        Connection("https://ada:secret@node:1/path", timeout_seconds=1)
    assert "secret" not in str(refused.value)


def test_a_token_goes_before_a_password() -> None:
    sent = head("https://ada:secret@node:1", Authorization="Bearer token")
    assert [line for line in sent if line.startswith("Authorization")] == ["Authorization: Bearer token"]


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://ada:secret@node:1", "https://node:1"),
        ("http://ada:sec/ret@node:1/x", "http://node:1/x"),
        ("http://node:1", "http://node:1"),
        ("unix:///run/a@b.sock", "unix:///run/a@b.sock"),
        ("ada@node", "ada@node"),
    ],
)
def test_a_url_is_shown_without_its_password(url: str, shown: str) -> None:
    assert shown_url(url) == shown


def test_only_who_speaks_tls_pays_for_it() -> None:
    code = (
        "import sys, gpumem_exporter.client._transport as t, gpumem_exporter.client._worker\n"
        "[t.Connection(url, timeout_seconds=1) for url in ('http://127.0.0.1:1', 'unix:///run/none.sock')]\n"
        "print(*{'ssl', 'base64'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "\n"
