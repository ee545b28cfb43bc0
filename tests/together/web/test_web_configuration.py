"""The TLS settings and headers of `--web.config.file`, in real handshakes."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import ssl
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trustme

from tests.support.certificates import authority, folder, issue, trust
from tests.support.running_exporter import running_exporter
from tests.support.waiting import eventually, patient

__all__ = ["authority", "folder"]

FILES = {"cert_file": "tls.crt", "key_file": "tls.key"}
VERIFIED = {**FILES, "client_auth_type": "RequireAndVerifyClientCert", "client_ca_file": "authority.crt"}

REFUSED = (OSError, http.client.HTTPException)
"""The possible errors of a refused client: they depend on when it reads the refusal."""


@dataclass(frozen=True)
class Server:
    """An exporter behind https."""

    port: int
    folder: Path

    def client(self, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
        """Return the context of a client."""
        context = ssl.create_default_context(cafile=str(self.folder / "authority.crt"))
        if certificate is not None:
            certificate.configure_cert(context)
        return context

    def handshake(self, context: ssl.SSLContext) -> bytes:
        """Return the certificate of a new connection."""
        with (
            socket.create_connection(("127.0.0.1", self.port), patient(30)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            return connection.getpeercert(binary_form=True) or b""

    def get(self, context: ssl.SSLContext, path: str = "/-/healthy") -> tuple[int, list[tuple[str, str]]]:
        """Return status and headers of a reply."""
        with closing(
            http.client.HTTPSConnection("127.0.0.1", self.port, timeout=patient(30), context=context)
        ) as connection:
            connection.request("GET", path)
            reply = connection.getresponse()
            reply.read()
            return reply.status, reply.getheaders()


@contextlib.contextmanager
def serving(folder: Path, tls: Mapping[str, Any], **sections: Any) -> Iterator[Server]:
    """Run an exporter with this web configuration."""
    config = folder / "web.yml"
    config.write_text(json.dumps({"tls_server_config": tls, **sections}))
    with running_exporter(web_config_file=str(config), ready=False) as exporter:
        yield Server(exporter.port, folder)


def test_older_versions_are_refused(folder: Path) -> None:
    with serving(folder, {**FILES, "min_version": "TLS13"}) as server:
        assert server.get(server.client())[0] == 200
        older = server.client()
        older.maximum_version = ssl.TLSVersion.TLSv1_2
        with pytest.raises(REFUSED):
            server.handshake(older)


def test_configured_headers_replace_those_of_the_exporter_on_every_reply(folder: Path) -> None:
    headers = {
        "Content-Security-Policy": "default-src 'self'",
        "Strict-Transport-Security": "max-age=600",
        "X-Content-Type-Options": "nosniff",
        "X-Frame-Options": "sameorigin",
        "X-XSS-Protection": "0",
    }
    with serving(folder, FILES, http_server_config={"http2": False, "headers": headers}) as server:
        for path, status in (("/", 200), ("/metrics", 200), ("/nothing", 404)):
            answered, received = server.get(server.client(), path)
            assert answered == status
            for name, value in headers.items():
                assert [v for n, v in received if n.lower() == name.lower()] == [value], (path, name)
            assert ("referrer-policy", "no-referrer") in [(n.lower(), v) for n, v in received]
    with serving(folder, FILES) as server:
        _, received = server.get(server.client(), "/")
        assert ("x-frame-options", "DENY") in [(n.lower(), v) for n, v in received]


def test_a_renewed_certificate_is_served_without_a_restart(folder: Path, authority: trustme.CA) -> None:
    with serving(folder, FILES) as server:
        first = server.handshake(server.client())
        (folder / "tls.key").write_text("half a ke")
        (folder / "tls.crt").unlink()
        kept = server.handshake(server.client())
        assert kept == first
        issue(authority, folder)
        renewed = eventually(lambda: server.handshake(server.client()), lambda seen: seen != first)
        assert ssl.DER_cert_to_PEM_cert(renewed) in (folder / "tls.crt").read_text()


def test_a_client_of_a_removed_authority_cannot_resume_its_session(folder: Path, authority: trustme.CA) -> None:
    (folder / "clients.crt").write_bytes((folder / "authority.crt").read_bytes())
    renewed = trustme.CA()
    with serving(folder, {**VERIFIED, "client_ca_file": "clients.crt"}) as server:
        client = server.client(authority.issue_cert("client.example"))
        session = resumed(server, client, None)
        trust(renewed, folder, "clients.crt")
        accepted = server.client(renewed.issue_cert("client.example"))
        eventually(lambda: is_admitted(server, accepted), bool)
        with pytest.raises(REFUSED):
            resumed(server, client, session)


def is_admitted(server: Server, context: ssl.SSLContext) -> bool:
    try:
        return server.get(context)[0] == 200
    except REFUSED:
        return False


def resumed(server: Server, context: ssl.SSLContext, session: ssl.SSLSession | None) -> ssl.SSLSession | None:
    """Send a request in this session, and return its session."""
    with (
        socket.create_connection(("127.0.0.1", server.port), patient(30)) as plain,
        context.wrap_socket(plain, server_hostname="localhost", session=session) as connection,
    ):
        connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: localhost\r\n\r\n")
        if not connection.recv(4096).startswith(b"HTTP/1.1 200 "):
            raise ConnectionResetError
        return connection.session
