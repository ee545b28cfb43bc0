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
AES_128, AES_256 = "ECDHE-ECDSA-AES128-GCM-SHA256", "ECDHE-ECDSA-AES256-GCM-SHA384"
GO_NAMES = {
    AES_128: "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
    AES_256: "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
}
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

    def handshake(self, context: ssl.SSLContext) -> tuple[str, bytes]:
        """Return the cipher suite and the certificate of a new connection."""
        with (
            socket.create_connection(("127.0.0.1", self.port), patient(30)) as plain,
            context.wrap_socket(plain, server_hostname="localhost") as connection,
        ):
            cipher = connection.cipher()
            assert cipher is not None
            return cipher[0], connection.getpeercert(binary_form=True) or b""

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


def at_most_tls12(context: ssl.SSLContext, ciphers: str) -> ssl.SSLContext:
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(ciphers)
    return context


def test_other_cipher_suites_of_tls_1_2_are_refused(folder: Path) -> None:
    with serving(folder, {**FILES, "cipher_suites": [GO_NAMES[AES_256]]}) as server:
        suite, _ = server.handshake(at_most_tls12(server.client(), f"{AES_128}:{AES_256}"))
        assert suite == AES_256
        with pytest.raises(REFUSED):
            server.handshake(at_most_tls12(server.client(), AES_128))
        suite, _ = server.handshake(server.client())
        assert suite.startswith("TLS_"), "a suite of TLS 1.3"


@pytest.mark.parametrize(("prefer_server", "chosen"), [(True, AES_256), (False, AES_128)])
def test_the_order_of_the_cipher_suites_is_the_servers_or_the_clients(
    folder: Path, prefer_server: bool, chosen: str
) -> None:
    suites = [GO_NAMES[AES_256], GO_NAMES[AES_128], "TLS_AES_128_GCM_SHA256"]
    tls = {**FILES, "cipher_suites": suites, "prefer_server_cipher_suites": prefer_server}
    with serving(folder, tls) as server:
        suite, _ = server.handshake(at_most_tls12(server.client(), f"{AES_128}:{AES_256}"))
        assert suite == chosen


def test_versions_out_of_range_are_refused(folder: Path) -> None:
    with serving(folder, {**FILES, "min_version": "TLS13", "cipher_suites": ["TLS_AES_128_GCM_SHA256"]}) as server:
        assert server.get(server.client())[0] == 200
        with pytest.raises(REFUSED):
            server.handshake(at_most_tls12(server.client(), "DEFAULT"))
    with serving(folder, {**FILES, "max_version": "TLS12"}) as server:
        assert server.handshake(server.client())[0].startswith("ECDHE-")
        only_newer = server.client()
        only_newer.minimum_version = ssl.TLSVersion.TLSv1_3
        with pytest.raises(REFUSED):
            server.handshake(only_newer)


def test_only_clients_with_an_allowed_name_are_admitted(folder: Path, authority: trustme.CA) -> None:
    names = ["scraper.example", "192.0.2.7", "2001:db8::7", "ada@mail.example"]
    with serving(folder, {**VERIFIED, "client_allowed_sans": names}) as server:
        for name in names:
            admitted = server.client(authority.issue_cert("other.example", name))
            assert server.get(admitted)[0] == 200, name
        for name in ("other.example", "sub.scraper.example", "192.0.2.8", "2001:db8::8"):
            refused = server.client(authority.issue_cert(name))
            with pytest.raises(REFUSED):
                server.get(refused)
        unnamed = server.client(authority.issue_cert(common_name="scraper.example"))
        with pytest.raises(REFUSED):
            server.get(unnamed)


def test_allowed_names_apply_to_clients_that_have_a_certificate(folder: Path, authority: trustme.CA) -> None:
    tls = {**VERIFIED, "client_auth_type": "VerifyClientCertIfGiven", "client_allowed_sans": ["scraper.example"]}
    with serving(folder, tls) as server:
        assert server.get(server.client())[0] == 200
        assert server.get(server.client(authority.issue_cert("scraper.example")))[0] == 200
        with pytest.raises(REFUSED):
            server.get(server.client(authority.issue_cert("other.example")))


def test_certificates_and_key_can_be_in_the_configuration_itself(folder: Path, authority: trustme.CA) -> None:
    text = {name: (folder / name).read_text() for name in ("tls.crt", "tls.key", "authority.crt")}
    (folder / "tls.crt").unlink()
    (folder / "tls.key").unlink()
    tls = {
        "cert": text["tls.crt"],
        "key": text["tls.key"],
        "client_auth_type": "RequireAndVerifyClientCert",
        "client_ca": text["authority.crt"],
    }
    with serving(folder, tls) as server:
        assert server.get(server.client(authority.issue_cert("client.example")))[0] == 200
        with pytest.raises(REFUSED):
            server.get(server.client(trustme.CA().issue_cert("client.example")))


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
        _, first = server.handshake(server.client())
        (folder / "tls.key").write_text("half a ke")
        (folder / "tls.crt").unlink()
        _, kept = server.handshake(server.client())
        assert kept == first
        issue(authority, folder)
        _, renewed = eventually(lambda: server.handshake(server.client()), lambda seen: seen[1] != first)
        assert ssl.DER_cert_to_PEM_cert(renewed) in (folder / "tls.crt").read_text()


def test_a_renewed_client_authority_is_used_without_a_restart(folder: Path, authority: trustme.CA) -> None:
    (folder / "clients.crt").write_bytes((folder / "authority.crt").read_bytes())
    renewed = trustme.CA()
    with serving(folder, {**VERIFIED, "client_ca_file": "clients.crt"}) as server:
        old, new = (server.client(issuer.issue_cert("client.example")) for issuer in (authority, renewed))
        assert (is_admitted(server, old), is_admitted(server, new)) == (True, False)
        trust(renewed, folder, "clients.crt")
        eventually(lambda: is_admitted(server, new), bool)
        assert not is_admitted(server, old)


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
