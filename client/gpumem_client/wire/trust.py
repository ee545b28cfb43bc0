"""Which exporters a client accepts: whom it sends reports and tokens, and whose commands it runs.

Any user of a machine may listen on a free port, or at a path in a folder of their own. The kernel shows whose process
answers (`wire.peer`); another machine needs a certificate.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_client.wire.errors import ConfigurationError, ExporterUntrustedError
from gpumem_client.wire.peer import tcp_listener_owner, tcp_peer_owner, unix_peer

if TYPE_CHECKING:
    import ssl

WRITABLE_BY_OTHERS = 0o022


@dataclass(frozen=True)
class Trust:
    """The users whose exporters are accepted. Immutable."""

    uids: frozenset[int]
    """Users whose process may be an exporter: root, the own user, and GPUMEM_EXPORTER_USER."""
    insecure: bool = False
    """Whether an exporter on another machine needs no certificate: GPUMEM_EXPORTER_INSECURE=1."""
    own_tunnel: bool = False
    """Whether a server on this machine needs no certificate over TLS if one of the users runs it, because it is a
    tunnel: the certificate behind it has another name."""

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Trust:
        """Return the settings in the environment.

        Raises:
            ConfigurationError: GPUMEM_EXPORTER_USER is not a user of this machine.
        """
        uids = {0, os.geteuid()}
        user = environ.get("GPUMEM_EXPORTER_USER", "").strip()
        if user:
            uids.add(_uid(user))
        return cls(frozenset(uids), environ.get("GPUMEM_EXPORTER_INSECURE", "").strip() == "1")

    def objection(self, sock: socket.socket, path: str) -> str:
        """Return why the server at the other end is not accepted; empty if it is.

        The connection has no TLS: over TLS, the certificate has been checked. `path` is the path of a unix socket, or
        empty for TCP.
        """
        if path:
            peer = unix_peer(sock).uid
            return "" if _assigned_by_root(os.path.dirname(path), peer) else self._objection_to(peer)  # noqa: PTH120
        uid, on_this_machine = _tcp_server(sock)
        if uid is not None:
            return self._objection_to(uid)
        if self.insecure:
            return ""
        if on_this_machine:
            return "the kernel does not show its user: use the unix socket or https, or set GPUMEM_EXPORTER_INSECURE=1"
        return "it is on another machine and has no certificate: use https, or set GPUMEM_EXPORTER_INSECURE=1"

    def _objection_to(self, uid: int) -> str:
        if uid in self.uids:
            return ""
        return (
            f"it runs as uid {uid}, which is neither root nor this user: set GPUMEM_EXPORTER_USER={uid} if it is the "
            "node's exporter"
        )


def _uid(user: str) -> int:
    if user.isascii() and user.isdecimal():
        return int(user)
    import pwd  # only for a name

    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        raise ConfigurationError(
            f"invalid GPUMEM_EXPORTER_USER {user!r}: expected the name or the uid of a user of this machine"
        ) from None


def _assigned_by_root(folder: str, uid: int) -> bool:
    """Return whether root gave this folder to the user, and no other user can replace it."""
    # It belongs to the user, every parent to root, and only the owners may write to them: so only root can have made
    # it for this user. /run/gpumem of the image, of Compose and of the systemd unit is such a folder.
    folder = os.path.realpath(folder)
    owner = uid
    while True:
        try:
            status = os.stat(folder)  # noqa: PTH116 - the client does not import pathlib
        except OSError:
            return False
        if status.st_uid != owner or status.st_mode & WRITABLE_BY_OTHERS:
            return False
        parent = os.path.dirname(folder)  # noqa: PTH120
        if parent == folder:
            return True
        folder, owner = parent, 0


def _tcp_server(sock: socket.socket) -> tuple[int | None, bool]:
    """Return the uid of the server, if the kernel knows it, and whether it is on this machine."""
    try:
        server, client = sock.getpeername(), sock.getsockname()
    except OSError:
        return None, False
    accepted = tcp_peer_owner(sock)
    if accepted is not None:
        return accepted.uid, True
    if server[0] != client[0] and not server[0].startswith(("127.", "::ffff:127.")) and server[0] != "::1":
        return None, False  # the kernel takes a connection to an address of this machine from the same address
    # A connection that waits to be accepted belongs to the socket that listens.
    listener = tcp_listener_owner(server[:2])
    return (None if listener is None else listener.uid), True


def over_tls(sock: socket.socket, host: str | bytes, shown_url: str, trust: Trust) -> ssl.SSLSocket:
    """Start TLS on a new connection to a server whose certificate must have the name `host`, unless it is a tunnel.

    The trusted authorities are the system's, or the authorities in SSL_CERT_FILE, which is read each time.

    Raises:
        ExporterUntrustedError: the certificate is not trusted.
        OSError: the server does not speak TLS, or closed the connection.
    """
    import ssl  # only for https, because it is slow to import

    context = ssl.create_default_context()
    if trust.own_tunnel and _tcp_server(sock)[0] in trust.uids:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    try:
        return context.wrap_socket(sock, server_hostname=host)
    except ssl.SSLCertVerificationError as error:
        raise ExporterUntrustedError(
            f"the certificate of the exporter at {shown_url} is not trusted: {error.verify_message}; set SSL_CERT_FILE "
            "to a file with its authority's certificate"
        ) from None
    except ssl.SSLError as error:
        raise OSError(f"no TLS with the server ({error.reason or 'it closed the connection'})") from error
