"""Certificates in files for `--web.config.file`."""

from __future__ import annotations

from pathlib import Path

import trustme

__all__ = ["issue", "trust"]


def issue(authority: trustme.CA, folder: Path, name: str = "tls") -> None:
    """Write `NAME.crt`, for 127.0.0.1 and localhost, and `NAME.key`."""
    certificate = authority.issue_cert("127.0.0.1", "localhost")
    (folder / f"{name}.crt").write_bytes(b"".join(blob.bytes() for blob in certificate.cert_chain_pems))
    certificate.private_key_pem.write_to_path(str(folder / f"{name}.key"))


def trust(authority: trustme.CA, folder: Path, name: str = "authority.crt") -> Path:
    """Write the certificate of the authority."""
    authority.cert_pem.write_to_path(str(folder / name))
    return folder / name
