"""HTTP to the exporter over TCP, TLS or a unix socket, on plain sockets.

Not `http.client`: its parsing of headers takes a third of what a whole report costs, and a socket with a timeout of
Python's own lets go of the GIL twice for each send and each receive, which beside a program that computes costs 5 ms a
time. Here the kernel keeps the time (SO_RCVTIMEO), and a request is one send and usually one receive. Over TLS it is
Python's own timeout after all: OpenSSL's reading knows no other.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from gpumem_exporter.errors import ConfigurationError, ExporterUnreachableError

__all__ = ["MAX_ANSWER_BYTES", "Answer", "Connection", "shown_url"]

MAX_ANSWER_BYTES = 64 << 20
"""No honest answer is longer; a longer one counts as no answer."""

_LINE_BYTES_MAX = 64 << 10
_HEADERS_MAX = 100
_RECEIVE_BYTES = 256 << 10
_TIMEVAL = struct.Struct("@ll")
_TLS_ENDS = ("SSLEOFError", "SSLZeroReturnError")
"""What `ssl`, which is not imported here, calls a connection that the other end has closed."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, whole. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """One kept-alive connection to an exporter. Not thread-safe, but for `interrupt`.

    Args:
        url: `http://host:port`, `https://host:port` or `unix:///path/to.sock`; `user:password@` before the host is
            basic authentication, for requests that bring no `Authorization` of their own.
        timeout_seconds: for connecting, and for each wait for the exporter's next bytes.

    Raises:
        ConfigurationError: the URL is none of these forms.
    """

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url
        self._timeout_seconds = timeout_seconds
        self._exporter = _exporter(url)
        if self._exporter.tls:
            import gpumem_exporter.wire.tls  # noqa: F401 - here, and not first in the thread that connects
        self._socket: socket.socket | None = None
        self._wait_seconds = 0.0
        self._received = b""
        self._interrupted = False

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_seconds: float | None = None,
    ) -> Answer:
        """Send one request and read the whole answer.

        A kept connection that the exporter has closed meanwhile is opened anew, once. That may send a request twice:
        everything this project posts is safe to repeat.

        Raises:
            ExporterUnreachableError: nobody answers, not in time, or not in HTTP; or the certificate is not believed.
        """
        reused = self._socket is not None
        wait_seconds = timeout_seconds or self._timeout_seconds
        request = self._request(method, path, body, headers or {})
        try:
            return self._exchange(method, request, wait_seconds)
        except ConnectionError as error:
            self.close()
            if not reused or self._interrupted:
                raise self._unreachable(error) from error
        except (OSError, ValueError) as error:
            self.close()
            raise self._unreachable(error) from error
        try:
            return self._exchange(method, request, wait_seconds)
        except (OSError, ValueError) as error:
            self.close()
            raise self._unreachable(error) from error

    def interrupt(self) -> None:
        """Make a `request` that waits in another thread fail now, and all later ones. Any thread may call this."""
        self._interrupted = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                # An SSLSocket's own `shutdown` would first end TLS, and the socket would go on without it.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        sock, self._socket = self._socket, None
        self._received = b""
        if sock is not None:
            with contextlib.suppress(OSError):  # the user's code may have closed the descriptor
                sock.close()

    def _request(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {_host(self._exporter.address)}", "Accept-Encoding: identity"]
        if self._exporter.authorization and "Authorization" not in headers:
            lines.append(f"Authorization: {self._exporter.authorization}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        if any("\r" in line or "\n" in line for line in lines):
            raise self._unreachable(ValueError("a header with a line break in it"))
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (body or b"")

    def _exchange(self, method: str, request: bytes, wait_seconds: float) -> Answer:
        sock = self._socket
        if sock is None and not self._interrupted:
            sock = self._socket = _connect(self._exporter, self._timeout_seconds, self.url)
            self._wait_seconds = 0.0
        # Asked once the socket can be seen: `interrupt` sets this before it looks for the socket, so that one of the
        # two always notices the other.
        if sock is None or self._interrupted:
            raise ConnectionAbortedError("interrupted")
        if wait_seconds != self._wait_seconds:
            if self._exporter.tls:
                sock.settimeout(wait_seconds)
            else:
                limit = _TIMEVAL.pack(int(wait_seconds), max(1, int(wait_seconds % 1 * 1e6)))
                for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                    sock.setsockopt(socket.SOL_SOCKET, option, limit)
            self._wait_seconds = wait_seconds
        try:
            sock.sendall(request)
            status, version, headers = self._head(sock)
            bodiless = method == "HEAD" or status in (204, 304)
            body, ends = (b"", False) if bodiless else self._body(sock, headers)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        except OSError as error:
            if self._exporter.tls and type(error).__name__ in _TLS_ENDS:
                raise ConnectionResetError("closed without an answer") from None
            raise
        said = headers.get("connection", "").lower()
        if ends or said == "close" or (version == b"HTTP/1.0" and said != "keep-alive"):
            self.close()
        return Answer(status, headers, body)

    def _head(self, sock: socket.socket) -> tuple[int, bytes, dict[str, str]]:
        status = 100
        while 100 <= status < 200:
            version, _, rest = self._line(sock, first=True).partition(b" ")
            code = rest[:3]
            if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or rest[3:4].strip():
                raise ValueError(f"not an HTTP answer: {(version + rest)[:80]!r}")
            status = int(code)
            headers: dict[str, str] = {}
            count = 0
            while line := self._line(sock):
                count += 1
                if count > _HEADERS_MAX:
                    raise ValueError(f"more than {_HEADERS_MAX} headers")
                name, colon, value = line.decode("latin-1").partition(":")
                if not colon:
                    raise ValueError(f"not a header: {line[:80]!r}")
                headers[name.lower()] = value.strip()
        return status, version, headers

    def _body(self, sock: socket.socket, headers: Mapping[str, str]) -> tuple[bytes, bool]:
        """The body, and whether only the connection's end tells its end."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunks(sock), False
        length = headers.get("content-length")
        if length is None:
            parts = [self._received]
            self._received = b""
            size = len(parts[0])
            while part := sock.recv(_RECEIVE_BYTES):
                size += len(part)
                _require_bounded(size)
                parts.append(part)
            return b"".join(parts), True
        if not length.isdecimal():
            raise ValueError(f"a Content-Length of {length[:80]!r}")
        return self._exactly(sock, int(length)), False

    def _chunks(self, sock: socket.socket) -> bytes:
        body = bytearray()
        while size := int(self._line(sock).partition(b";")[0], 16):
            body += self._exactly(sock, size)
            _require_bounded(len(body))
            self._line(sock)
        while self._line(sock):
            pass
        return bytes(body)

    def _line(self, sock: socket.socket, *, first: bool = False) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _LINE_BYTES_MAX:
                raise ValueError("a line without an end")
            self._more(sock, started=not first or bool(self._received))
        line, self._received = self._received[:end], self._received[end + 1 :]
        return line.rstrip(b"\r")

    def _exactly(self, sock: socket.socket, size: int) -> bytes:
        _require_bounded(size)
        if len(self._received) < size:
            parts, there = [self._received], len(self._received)
            while there < size:
                self._received = b""
                self._more(sock, started=True)
                parts.append(self._received)
                there += len(self._received)
            self._received = b"".join(parts)
        body, self._received = self._received[:size], self._received[size:]
        return body

    def _more(self, sock: socket.socket, *, started: bool) -> None:
        part = sock.recv(_RECEIVE_BYTES)
        if not part:
            if started:
                raise ValueError("the answer ends before its end")
            raise ConnectionResetError("closed without an answer")
        self._received += part

    def _unreachable(self, error: Exception) -> ExporterUnreachableError:
        return ExporterUnreachableError(
            f"no exporter answers at {shown_url(self.url)}: {str(error) or type(error).__name__}"
        )


def _require_bounded(size: int) -> None:
    if not 0 <= size <= MAX_ANSWER_BYTES:
        raise ValueError(f"an answer of over {MAX_ANSWER_BYTES} bytes")


def shown_url(url: str) -> str:
    """An exporter's URL as messages may have it: without a password."""
    scheme, separator, rest = url.partition("://")
    return url if scheme == "unix" else f"{scheme}{separator}{rest.rpartition('@')[2]}"


@dataclass(frozen=True, slots=True)
class _Exporter:
    """What a URL says."""

    address: tuple[str, int] | str
    tls: bool = False
    authorization: str = ""


def _connect(exporter: _Exporter, timeout_seconds: float, url: str) -> socket.socket:
    if isinstance(exporter.address, str):
        sock = socket.socket(socket.AF_UNIX)
    else:
        host, port = _plain_name(exporter.address[0]), exporter.address[1]
        sock = socket.create_connection((host, port), timeout_seconds)  # type: ignore[arg-type]
    try:
        if isinstance(exporter.address, str):
            sock.settimeout(timeout_seconds)
            sock.connect(exporter.address)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if exporter.tls:
                from gpumem_exporter.wire.tls import over_tls

                return over_tls(sock, host, shown_url(url))
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock


def _plain_name(host: str) -> str | bytes:
    """A host's name in a form that has Python load nothing, if there is one: for a text it loads a codec.

    A process that forks while another thread loads a module has a child that waits for that module for ever.
    """
    return host.encode() if host.isascii() else host


def _host(address: tuple[str, int] | str) -> str:
    if isinstance(address, str):
        return "localhost"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _exporter(url: str) -> _Exporter:
    wrong = ConfigurationError(
        f"exporter URL {shown_url(url)!r}: expected http://host:port, https://host:port or unix:///path/to.sock"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.query or parts.fragment:
        raise wrong
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return _Exporter(parts.path)
    if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        tls = parts.scheme == "https"
        return _Exporter((parts.hostname, port or (443 if tls else 80)), tls, _basic(parts.username, parts.password))
    raise wrong


def _basic(user: str | None, password: str | None) -> str:
    if user is None:
        return ""
    import base64  # only whoever has a password pays for it

    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()
