"""The sockets that the exporter listens on. They are bound before anything else starts."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Iterable, Iterator, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from gpumem_client.wire.errors import GpumemError
from gpumem_client.wire.peer import tcp_listener_owner, unix_peer, user_name
from gpumem_client.wire.trust import WRITABLE_BY_OTHERS

BACKLOG = 1024
PROBE_SECONDS = 1.0
_IN_USE = "; if that is not an exporter, choose another --web.listen-address"
_ADDRESS = re.compile(
    r"(\[(?P<ipv6>[^]]+)\]|(?P<name>[A-Za-z0-9_]([A-Za-z0-9_.-]{0,251}[A-Za-z0-9_])?)?):(?P<port>[0-9]{1,5})"
)
_FIRST_DESCRIPTOR = 3
_SYSTEMD_VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID")


@dataclass(frozen=True, slots=True)
class ListenAddress:
    """An address of `--web.listen-address`: `host:port`, `[ipv6]:port`, or `:port` for every address of the machine."""

    host: str
    port: int

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine reaches it."""
        return self.host == "localhost" or is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def parse_listen_address(text: str) -> ListenAddress:
    """Parse an address, or raise ValueError with the accepted forms. With port 0 the kernel chooses the port."""
    found = _ADDRESS.fullmatch(text.strip())
    with contextlib.suppress(ValueError):
        if found is not None and int(found["port"]) <= 65535:
            host = str(ipaddress.IPv6Address(found["ipv6"])) if found["ipv6"] else found["name"] or ""
            return ListenAddress(host, int(found["port"]))
    raise ValueError("expected HOST:PORT, [IPV6]:PORT or :PORT")


def is_loopback(host: str) -> bool:
    """Return whether the address of a peer is a loopback address of this machine."""
    return host == "::1" or host.startswith(("127.", "::ffff:127."))


class BindError(GpumemError):
    """The exporter cannot listen on an address; the message is one line."""


class SocketFile:
    """The file of the unix socket, by whose path clients connect. It is the file that is at the path now."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._status = os.lstat(path)

    def error(self) -> str:
        """Return why clients do not reach this exporter by the path; empty if they do."""
        with contextlib.suppress(OSError):
            if os.path.samestat(os.lstat(self.path), self._status):
                return ""
        fix = "remove what is there now, and restart the exporter or the socket unit of systemd that made it"
        return f"the socket {self.path} was removed or replaced: {fix}"

    def remove(self) -> None:
        """Delete the file, unless it was replaced."""
        if not self.error():
            with contextlib.suppress(OSError):
                Path(self.path).unlink()


class Listeners(contextlib.ExitStack):
    """Bound sockets and their URLs. Its end closes them, and deletes the file of a unix socket that it created."""

    def __init__(self) -> None:
        super().__init__()
        self.sockets: list[socket.socket] = []
        self.socket_file: SocketFile | None = None

    @property
    def unix_path(self) -> str:
        """The path of the unix socket; empty without one."""
        return self.socket_file.path if self.socket_file is not None else ""

    @property
    def addresses(self) -> tuple[str, ...]:
        """The TCP addresses, in the form of `--web.listen-address`."""
        return tuple(_authority(sock) for sock in self.sockets if sock.family != socket.AF_UNIX)

    def names(self, *, tls: bool = False) -> tuple[str, ...]:
        """Return the URLs for clients: `http://127.0.0.1:9844`, `unix:///run/gpumem/exporter.sock`."""
        scheme = "https" if tls else "http"
        return tuple(
            f"unix://{self.unix_path}" if sock.family == socket.AF_UNIX else f"{scheme}://{_authority(sock)}"
            for sock in self.sockets
        )

    @property
    def on_all_addresses(self) -> bool:
        """Whether a socket listens on every address of the machine."""
        return any(
            sock.family != socket.AF_UNIX and ipaddress.ip_address(sock.getsockname()[0]).is_unspecified
            for sock in self.sockets
        )

    def add(self, sock: socket.socket) -> None:
        """Add a socket that listens."""
        self.sockets.append(self.enter_context(sock))

    def add_unix(self, path: str) -> None:
        """Listen on a unix socket. The file of a killed exporter is replaced, the file of a running one is not.

        Raises BindError if the socket cannot be created, or if other users could replace it.
        """
        try:
            # Mode 0755 whatever the umask: with root's 077 no other user could reach the socket.
            with umask(0o022), contextlib.suppress(FileExistsError):
                Path(path).parent.mkdir()
            _require_own_folder(Path(path).parent)
            _remove_unused_socket(path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self.add(sock)
            # Mode 0666: each request is authorized by the credentials of the peer or by a token.
            with umask(0o111):
                sock.bind(path)
            self.socket_file = SocketFile(path)
            self.callback(self.socket_file.remove)
            sock.listen(BACKLOG)
        except OSError as error:
            raise BindError(f"cannot listen on {path}: {_reason(error)}") from error

    def add_tcp(self, address: ListenAddress) -> None:
        """Listen on a TCP address, or raise BindError. Without a host, listen on every address of the machine."""
        try:
            if not address.host:
                # One socket for both families, unless the kernel has no IPv6.
                both = socket.has_dualstack_ipv6()
                family = socket.AF_INET6 if both else socket.AF_INET
                self.add(socket.create_server(("", address.port), family=family, backlog=BACKLOG, dualstack_ipv6=both))
                return
            # A name such as localhost has one address of each family, and each of them gets a socket.
            found = socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, where in dict.fromkeys(found):
                self.add(socket.create_server(where, family=family, backlog=BACKLOG))
        except OSError as error:
            fix = f"{_by_whom(address)}{_IN_USE}" if error.errno == errno.EADDRINUSE else ""
            raise BindError(f"cannot listen on {address}: {_reason(error)}{fix}") from error


def bind(addresses: Iterable[str], unix_path: str = "") -> Listeners:
    """Listen on every address. If one of them cannot be bound, close all sockets and raise BindError."""
    listeners = Listeners()
    try:
        for address in addresses:
            listeners.add_tcp(parse_listen_address(address))
        if unix_path:
            listeners.add_unix(unix_path)
    except BindError:
        listeners.close()
        raise
    return listeners


def _by_whom(address: ListenAddress) -> str:
    """Return the user of the process that listens at an address or at all addresses of the machine."""
    for host in filter(None, (address.host, "127.0.0.1", "::1")):
        owner = tcp_listener_owner((host, address.port))
        if owner is not None:
            return f" by a process of {user_name(owner.uid)}"
    return ""


def _require_own_folder(folder: Path) -> None:
    mode = folder.stat().st_mode
    if mode & WRITABLE_BY_OTHERS and not mode & stat.S_ISVTX:
        raise OSError(
            0,
            f"others may write to {folder} (mode {stat.S_IMODE(mode):04o}) and replace the socket; chmod go-w {folder}",
        )


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    """Create files with their final mode."""
    # A later chmod could reach a file that another user put at the path.
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


def _remove_unused_socket(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(mode):
        raise OSError(0, "the file exists and is not a socket")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(PROBE_SECONDS)
        try:
            probe.connect(path)
        except ConnectionRefusedError:  # no process listens: its exporter was killed
            Path(path).unlink(missing_ok=True)
            return
        except FileNotFoundError:
            return
        peer = unix_peer(probe)
    raise OSError(0, f"another process listens there: pid {peer.pid} of {user_name(peer.uid)}")


def _authority(sock: socket.socket) -> str:
    return str(ListenAddress(*sock.getsockname()[:2]))


def _reason(error: OSError) -> str:
    # `create_server` appends the address.
    text = (error.strerror or str(error)).partition(" (while attempting")[0]
    return text[:1].lower() + text[1:]


def take_systemd_sockets(environ: MutableMapping[str, str] = os.environ) -> Listeners:
    """Take over the sockets that systemd passes by socket activation: sd_listen_fds(3).

    Removes the variables from the environment. Raises BindError without a socket, or with one that the exporter cannot
    listen on.
    """
    # Removed, so that children do not use the sockets.
    pid, count, *_ = (environ.pop(name, "") for name in _SYSTEMD_VARIABLES)
    if pid != str(os.getpid()) or not count.isdecimal() or int(count) == 0:
        raise BindError(
            f"--web.systemd-socket: systemd passed no sockets to this process {os.getpid()} (LISTEN_PID is "
            f"{pid[:20]!r}, LISTEN_FDS {count[:20]!r}): start the socket unit before the service, and the exporter "
            "without a program in between"
        )
    listeners = Listeners()
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)):
        with contextlib.suppress(OSError, ValueError):  # it is no socket, or has no path
            # systemd passes descriptors that children inherit: they would keep the port open.
            os.set_inheritable(descriptor, False)
            listeners.add(sock := socket.socket(fileno=descriptor))
            streams = sock.type == socket.SOCK_STREAM and sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
            if streams and sock.family == socket.AF_UNIX and not listeners.unix_path:
                listeners.socket_file = SocketFile(sock.getsockname())
                continue
            if streams and sock.family in (socket.AF_INET, socket.AF_INET6):
                continue
        raise BindError(
            f"--web.systemd-socket: cannot use file descriptor {descriptor} of systemd: the exporter takes listening "
            "TCP sockets and one unix stream socket with a path; use ListenStream= and Accept=no in the socket unit"
        )
    return listeners
