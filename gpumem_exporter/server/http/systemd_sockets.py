"""The sockets that systemd passes to a service by socket activation: sd_listen_fds(3)."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping

from gpumem_exporter.server.http.listeners import BindError, Listeners, SocketFile

FIRST_DESCRIPTOR = 3
_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


def take_systemd_sockets(environ: MutableMapping[str, str] = os.environ) -> Listeners:
    """Take over the sockets of this process, and remove their variables so that children do not use them.

    Raises:
        BindError: systemd passed no socket, or one that the exporter cannot listen on; then all of them are closed.
    """
    pid, count, *_ = (environ.pop(name, "") for name in _VARIABLES)
    if not pid or not count.isdecimal() or int(count) == 0:
        raise BindError(
            "--web.systemd-socket: systemd passed no sockets (LISTEN_FDS and LISTEN_PID are not set): start the socket "
            "unit before the service, or leave the option out"
        )
    if pid != str(os.getpid()):
        raise BindError(
            f"--web.systemd-socket: systemd passed its sockets to process {pid[:20]} (LISTEN_PID), and this is process "
            f"{os.getpid()}: start the exporter directly, without a program in between"
        )
    listeners = Listeners()
    try:
        for descriptor in range(FIRST_DESCRIPTOR, FIRST_DESCRIPTOR + int(count)):
            _add(listeners, descriptor)
    except BindError:
        listeners.close()
        raise
    return listeners


def _add(listeners: Listeners, descriptor: int) -> None:
    """Add a socket. Its address family tells a TCP socket from a unix socket."""
    wrong = BindError(
        f"--web.systemd-socket: file descriptor {descriptor} of systemd is not a listening TCP or unix stream socket: "
        "use ListenStream= and Accept=no in the socket unit"
    )
    try:
        os.set_inheritable(descriptor, False)
        sock = socket.socket(fileno=descriptor)
    except OSError:
        raise wrong from None
    listeners.sockets.append(sock)
    listening = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    families = (socket.AF_INET, socket.AF_INET6, socket.AF_UNIX)
    if not listening or sock.type != socket.SOCK_STREAM or sock.family not in families:
        raise wrong
    if sock.family == socket.AF_UNIX:
        listeners.socket_file = _file_of(sock, listeners.unix_path)


def _file_of(sock: socket.socket, other: str) -> SocketFile:
    path = sock.getsockname()
    if other or not isinstance(path, str) or not path:
        raise BindError("--web.systemd-socket: the exporter takes one unix socket, and it must have a path")
    try:
        return SocketFile.at(path, owned=False)
    except OSError as error:
        raise BindError(f"--web.systemd-socket: the socket {path} of systemd: {error.strerror}") from None
