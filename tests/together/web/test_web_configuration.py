"""The TLS settings and headers of `--web.config.file`, in real handshakes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.certificates import authority, client_context, folder, trust
from tests.support.running_exporter import running_exporter
from tests.support.waiting import eventually, patient

__all__ = ["authority", "folder"]

FILES = {"cert_file": "tls.crt", "key_file": "tls.key"}
VERIFIED = {**FILES, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "authority.crt"}

REFUSED = (OSError, http.client.HTTPException)
"""The possible errors of a refused client: they depend on when it reads the refusal."""


def get(port: int, context: ssl.SSLContext, path: str = "/-/healthy") -> tuple[int, list[tuple[str, str]]]:
    """Return status and headers of a reply."""
    with closing(http.client.HTTPSConnection("127.0.0.1", port, timeout=patient(30), context=context)) as connection:
        connection.request("GET", path)
        reply = connection.getresponse()
        reply.read()
        return reply.status, reply.getheaders()


@contextlib.contextmanager
def serving(folder: Path, tls: Mapping[str, Any], **sections: Any) -> Iterator[int]:
    """Run an exporter with this web configuration, and yield its port."""
    config = folder / "web.yml"
    config.write_text(json.dumps({"tls_server_config": tls, **sections}))
    with running_exporter(web_config_file=str(config), ready=False) as exporter:
        yield exporter.port


def test_configured_headers_replace_those_of_the_exporter_on_every_reply(folder: Path) -> None:
    headers = {
        "Content-Security-Policy": "default-src 'self'",
        "Strict-Transport-Security": "max-age=600",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "sameorigin",
        "X-XSS-Protection": "0",
    }
    with serving(folder, FILES, http_server_config={"http2": False, "headers": headers}) as port:
        for path, status in (("/", 200), ("/metrics", 200), ("/nothing", 404)):
            answered, received = get(port, client_context(folder), path)
            assert answered == status
            for name, value in headers.items():
                assert [v for n, v in received if n.lower() == name.lower()] == [value], (path, name)
            assert ("referrer-policy", "no-referrer") in [(n.lower(), v) for n, v in received]
    with serving(folder, FILES) as port:
        _, received = get(port, client_context(folder), "/")
        assert ("x-frame-options", "DENY") in [(n.lower(), v) for n, v in received]


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_a_client_of_a_removed_authority_cannot_resume_its_session(
    version: ssl.TLSVersion, folder: Path, authority: trustme.CA
) -> None:
    (folder / "clients.crt").write_bytes((folder / "authority.crt").read_bytes())
    renewed = trustme.CA()
    with serving(folder, {**VERIFIED, "client_ca_file": "clients.crt"}) as port:
        client = client_context(folder, authority.issue_cert("client.example"))
        client.maximum_version = version
        session = resumed(port, client, None)
        trust(renewed, folder, "clients.crt")
        accepted = client_context(folder, renewed.issue_cert("client.example"))
        eventually(lambda: is_admitted(port, accepted), bool)
        with pytest.raises(REFUSED):
            resumed(port, client, session)


def is_admitted(port: int, context: ssl.SSLContext) -> bool:
    try:
        return get(port, context)[0] == 200
    except REFUSED:
        return False


def resumed(port: int, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """Send a request in this session, and return its session."""
    with (
        socket.create_connection(("127.0.0.1", port), patient(30)) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not connection.recv(4096).startswith(b"HTTP/1.1 200 "):
            raise ConnectionResetError
        return connection.session
