"""Checks of the unix socket: existence, permission to connect, and the listening process."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from gpumem_client.wire.peer import PeerCredentials, unix_peer, user_name
from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding

__all__ = ["check_socket", "socket_path", "socket_peer"]


def socket_path(urls: tuple[str, ...]) -> Path | None:
    """Return the path of the first address that is a unix socket."""
    return next((Path(url.removeprefix("unix://")) for url in urls if url.startswith("unix://")), None)


def socket_peer(path: Path, timeout_seconds: float = 2.0) -> PeerCredentials:
    """Connect and return the listening process.

    Raises:
        OSError: no process listens, or this user may not connect.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(timeout_seconds)
        connection.connect(str(path))
        return unix_peer(connection)


def check_socket(path: Path, *, required: bool) -> Iterator[Finding]:
    """Check the socket's file, its permissions and its listener. It is required if it is the only address."""
    user = user_name(os.geteuid())
    try:
        status = path.stat()
    except (FileNotFoundError, PermissionError) as error:
        missing = isinstance(error, FileNotFoundError)
        detail = f"none at {path}" if missing else f"this process ({user}) may not access {path}"
        if not required:
            yield Finding("socket", PASS, f"{detail}, and not needed: there is a TCP address")
        elif missing:
            fix = f"run serve with --web.listen-socket {path}, and mount its directory in the containers that report"
            yield Finding("socket", FAIL, detail, fix)
        else:
            fix = "run as root, or reach the exporter by TCP: --url http://127.0.0.1:9844"
            yield Finding("socket", FAIL, detail, fix)
        return
    verdict = FAIL if required else WARN
    described = f"{path} mode {stat.S_IMODE(status.st_mode):04o} of {user_name(status.st_uid)}"
    if not stat.S_ISSOCK(status.st_mode):
        fix = "remove it, and mount the socket's directory, not the socket"
        yield Finding("socket", verdict, f"{described} is not a socket", fix)
        return
    try:
        peer = socket_peer(path)
    except PermissionError:
        fix = "run as its owner or in its group, or set the exporter's umask so that others may write to it"
        yield Finding("socket", verdict, f"{described}: this process ({user}) may not connect", fix)
        return
    except OSError as error:
        fix = "start the exporter again: it replaces the socket of a killed exporter"
        reason = (error.strerror or str(error)).lower()
        yield Finding("socket", verdict, f"{described}: no process listens ({reason})", fix)
        return
    where = f"pid {peer.pid}" if peer.pid else "in another PID namespace"
    yield Finding("socket", PASS, f"{described}; listening: {where}, {user_name(peer.uid)}")
