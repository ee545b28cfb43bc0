"""Certificates in files for `--web.config.file`."""

from __future__ import annotations

import socket
import ssl
from pathlib import Path

import pytest
import trustme

from tests.support.waiting import patient


def issue(authority: trustme.CA, folder: Path, name: str = "tls") -> None:
    """Write `NAME.crt`, for 127.0.0.1 and localhost, and `NAME.key`."""
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    (folder / f"{name}.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))


def trust(authority: trustme.CA, folder: Path, name: str = "authority.crt") -> Path:
    """Write the certificate of the authority."""
    authority.cert_pem.write_to_path(str(folder / name))
    return folder / name


def client_context(folder: Path, certificate: trustme.LeafCert | None = None) -> ssl.SSLContext:
    """Return the context of a client that trusts `authority.crt` of a folder."""
    context = ssl.create_default_context(cafile=str(folder / "authority.crt"))
    if certificate is not None:
        certificate.configure_cert(context)
    return context


def handshake(port: int, context: ssl.SSLContext) -> bytes:
    """Return the certificate of a new connection."""
    with (
        socket.create_connection(("127.0.0.1", port), patient(30)) as plain,
        context.wrap_socket(plain, server_hostname="localhost") as connection,
    ):
        return connection.getpeercert(binary_form=True) or b""


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def folder(tmp_path: Path, authority: trustme.CA) -> Path:
    """A folder with a certificate, its key and its authority."""
    issue(authority, tmp_path)
    trust(authority, tmp_path)
    return tmp_path
