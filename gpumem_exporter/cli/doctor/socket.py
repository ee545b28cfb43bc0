"""The unix socket: is it there, may this user connect, and who listens behind it?"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from gpumem_exporter.cli.doctor.finding import FAIL, PASS, WARN, Finding

__all__ = ["Peer", "check_socket", "socket_path", "socket_peer"]

_UCRED = struct.Struct("3i")


@dataclass(frozen=True, slots=True)
class Peer:
    """Who listens behind a unix socket: SO_PEERCRED of unix(7)."""

    pid: int
    """In this process' PID namespace; 0 where it is not in it."""
    uid: int


def socket_path(urls: tuple[str, ...]) -> Path | None:
    """The path of the first address that is a unix socket."""
    return next((Path(url.removeprefix("unix://")) for url in urls if url.startswith("unix://")), None)


def socket_peer(path: Path, timeout_seconds: float = 2.0) -> Peer:
    """Connect, and ask the kernel who is there.

    Raises:
        OSError: nobody listens, or this user may not connect.
    """
    with closing(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)) as connection:
        connection.settimeout(timeout_seconds)
        connection.connect(str(path))
        pid, uid, _ = _UCRED.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    return Peer(pid, uid)


def check_socket(path: Path, *, required: bool) -> Iterator[Finding]:
    """Look at the socket's file, its permissions and its listener.

    Args:
        path: the socket.
        required: there is no other way to the exporter.
    """
    try:
        status = path.stat()
    except FileNotFoundError:
        if required:
            mend = f"serve with --web.listen-socket {path}, and mount its directory in the containers that report"
            yield Finding("socket", FAIL, f"none at {path}", mend)
        else:
            yield Finding("socket", PASS, f"none at {path}, and none is needed: TCP does")
        return
    except PermissionError:
        closed = f"{path} is closed to this user ({_user(os.geteuid())})"
        if required:
            mend = "run as root, or reach the exporter by TCP: --url http://127.0.0.1:9844"
            yield Finding("socket", FAIL, closed, mend)
        else:
            yield Finding("socket", PASS, f"{closed}, and is not needed: TCP does")
        return
    verdict = FAIL if required else WARN
    described = f"{path} mode {stat.S_IMODE(status.st_mode):04o} of {_user(status.st_uid)}"
    if not stat.S_ISSOCK(status.st_mode):
        mend = "remove it, and mount the socket's directory rather than the socket itself"
        yield Finding("socket", verdict, f"{described} is not a socket", mend)
        return
    try:
        peer = socket_peer(path)
    except PermissionError:
        mend = "run as its owner or in its group, or let the exporter's umask give others the right to write to it"
        yield Finding("socket", verdict, f"{described}: this user ({_user(os.geteuid())}) may not connect", mend)
        return
    except OSError as error:
        mend = "start the exporter again: it replaces a socket that a killed one left behind"
        yield Finding(
            "socket", verdict, f"{described}: nobody listens ({(error.strerror or str(error)).lower()})", mend
        )
        return
    where = f"pid {peer.pid}" if peer.pid else "in another PID namespace"
    yield Finding("socket", PASS, f"{described}; listening: {where}, {_user(peer.uid)}")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"uid {uid}"
