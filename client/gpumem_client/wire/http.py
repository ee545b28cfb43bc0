"""HTTP to the exporter over TCP, TLS or a Unix socket. A request is one send and usually one receive."""

# This is not `http.client`, which imports `email` and `ssl` and so adds a quarter to the import time of the client. Its
# parsing of headers is a third of the cost of a report, and its timeouts release the GIL twice for each send and
# receive.

from __future__ import annotations

import contextlib
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from gpumem_client.wire.errors import ConfigurationError, ExporterUnreachableError, ExporterUntrustedError
from gpumem_client.wire.trust import Trust, over_tls

DEFAULT_URLS = ("unix:///run/gpumem/exporter.sock", "http://127.0.0.1:9844")
"""The addresses to try, in this order, without GPUMEM_EXPORTER_URL."""
MAX_ANSWER_BYTES = 64 << 20
"""The default of `max_answer_bytes`."""

# The longest status line with its headers, and the longest line of a body in chunks.
_MAX_HEAD_BYTES = 64 << 10
_RECEIVE_BYTES = 256 << 10
_TIMEVAL = struct.Struct("@ll")
# The names of the errors of `ssl`, which is not imported here, for a connection that the exporter closed.
_CLOSED_TLS_ERRORS = ("SSLEOFError", "SSLZeroReturnError")


@dataclass(frozen=True)
class Answer:
    """A complete HTTP response. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """A persistent connection to an exporter. Only `interrupt` is thread-safe.

    The URL is `http://host:port`, `https://host:port` or `unix:///path/to.sock`; `user:password@` before the host is
    basic authentication for requests without a header `Authorization`. Another form is a ConfigurationError. The
    timeout is for connecting, and for each exchange of a request and its response.

    Credentials are sent only to a server that `trust` accepts, with `trusted_only` also any other request. A body
    longer than `max_answer_bytes` is an error.
    """

    def __init__(
        self,
        url: str,
        *,
        timeout_seconds: float,
        trust: Trust | None = None,
        trusted_only: bool = False,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        url = self.url = full_url(url)
        self._trust = trust if trust is not None else Trust.from_environment()
        self._trusted_only = trusted_only
        self._max_answer_bytes = max_answer_bytes
        self._timeout_seconds = timeout_seconds
        self._exporter = _exporter(url)
        if self._exporter.tls:
            import ssl  # noqa: F401 - now, rather than in the thread that connects
        self._socket: socket.socket | None = None
        self._opened_by = 0
        self._objection = ""
        self._timeouts: dict[int, float] = {}
        self._deadline = 0.0
        self._receives = 0
        self._received_bytes = 0
        self._received = b""
        self._interrupted = False
        self._while_waiting: Callable[[], float] | None = None

    @property
    def of_another_user(self) -> bool:
        """Whether this process has another user than when it connected, whom the kernel names to the server."""
        return self._socket is not None and self._opened_by != os.geteuid()

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` was called: every request fails."""
        return self._interrupted

    @property
    def objection(self) -> str:
        """Why the server of the last connection receives no credentials; empty if it is accepted."""
        return self._objection

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        *,
        timeout_seconds: float | None = None,
        while_waiting: Callable[[], float] | None = None,
    ) -> Answer:
        """Send one request and return the response.

        If the exporter has closed the persistent connection, the request is sent once more over a new one. The exporter
        may therefore receive it twice: every request of this project can be repeated.

        `while_waiting` is called before each wait for the start of the response, and returns the seconds after which it
        is called again. It is not called over TLS.

        Raises:
            ExporterUnreachableError: no server answers in time and with HTTP.
            ExporterUntrustedError: the server is not accepted; it has received nothing.
        """
        headers = headers or {}
        self._while_waiting = None if self._exporter.tls else while_waiting
        reused = self._socket is not None
        wait_seconds = timeout_seconds or self._timeout_seconds
        request = self._encode(method, path, body, headers)
        private = self._trusted_only or bool(self._exporter.authorization) or "Authorization" in headers
        try:
            try:
                return self._exchange(method, request, wait_seconds, private=private)
            except ConnectionError:
                # A server closes an idle connection at any time, also while the request is on its way. A new connection
                # that fails has a server that does not answer: no second attempt.
                self.close()
                if not reused or self._interrupted:
                    raise
                return self._exchange(method, request, wait_seconds, private=private)
        except ExporterUntrustedError:
            self.close()
            raise
        except (OSError, ValueError) as error:
            self.close()
            raise self._unreachable(error) from error

    def interrupt(self) -> None:
        """Make a waiting `request` of another thread, and every later one, fail. Thread-safe."""
        self._interrupted = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                # `SSLSocket.shutdown` would end TLS, and a request could continue without it.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. The next request opens another."""
        sock, self._socket = self._socket, None
        self._received = b""
        if sock is not None:
            with contextlib.suppress(OSError):  # the user's code may have closed the descriptor
                sock.close()

    def _encode(self, method: str, path: str, body: bytes | None, headers: Mapping[str, str]) -> bytes:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {_host(self._exporter.address)}", "Accept-Encoding: identity"]
        if self._exporter.authorization and "Authorization" not in headers:
            lines.append(f"Authorization: {self._exporter.authorization}")
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if body is not None:
            lines.append(f"Content-Length: {len(body)}")
        if any("\r" in line or "\n" in line for line in lines):
            raise self._unreachable(ValueError("a header contains a line break"))
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (body or b"")

    def _exchange(self, method: str, request: bytes, wait_seconds: float, *, private: bool) -> Answer:
        sock = self._socket
        if sock is None and not self._interrupted:
            self._opened_by = os.geteuid()
            sock = self._socket = _connect(self._exporter, self._timeout_seconds, self.url, self._trust)
            self._timeouts = {}
            self._objection = "" if self._exporter.tls else self._trust.objection(sock, self._exporter.socket_path)
        # `interrupt` sets the flag, then reads the socket. Here the socket is set, then the flag is read. So either
        # `interrupt` finds the socket or this finds the flag.
        if sock is None or self._interrupted:
            raise ConnectionAbortedError("interrupted")
        if private and self._objection:
            raise ExporterUntrustedError(f"the server at {shown_url(self.url)} is not trusted: {self._objection}")
        self._deadline, self._receives, self._received_bytes = time.monotonic() + wait_seconds, 0, 0
        self._set_timeout(sock, socket.SO_SNDTIMEO, wait_seconds)
        try:
            sock.sendall(request)
            status, version, headers = self._head(sock)
            without_body = method == "HEAD" or status in (204, 304)
            body, closes = (b"", False) if without_body else self._body(sock, headers)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        except OSError as error:
            if self._exporter.tls and type(error).__name__ in _CLOSED_TLS_ERRORS:
                raise ConnectionResetError("closed without a response") from None
            raise
        connection = headers.get("connection", "").lower()
        if closes or connection == "close" or (version == b"HTTP/1.0" and connection != "keep-alive"):
            self.close()
        return Answer(status, headers, body)

    def _set_timeout(self, sock: socket.socket, option: int, seconds: float) -> None:
        """Set the timeout of sends (`SO_SNDTIMEO`) or receives (`SO_RCVTIMEO`). TLS has one for both."""
        # The kernel's timeout, because one of Python's own costs 5 ms while another thread computes: Python releases
        # the GIL to wait with `poll`, and again for the transfer. Only TLS needs Python's timeout.
        if self._exporter.tls:
            sock.settimeout(seconds)
        elif seconds != self._timeouts.get(option):
            # At least a microsecond: a timeout of 0 would wait forever.
            timeval = _TIMEVAL.pack(int(seconds), max(1, int(seconds % 1 * 1e6)))
            sock.setsockopt(socket.SOL_SOCKET, option, timeval)
            self._timeouts[option] = seconds

    def _head(self, sock: socket.socket) -> tuple[int, bytes, dict[str, str]]:
        """Read status line and headers, and skip informational responses."""
        status = 0
        while status < 200:
            while (end := self._received.find(b"\r\n\r\n", 0, _MAX_HEAD_BYTES)) < 0:
                start = self._received[:_MAX_HEAD_BYTES]
                if not start.startswith(b"HTTP/"[: len(start)]) or len(start) == _MAX_HEAD_BYTES:
                    raise ValueError(f"not an HTTP response: {start[:80]!r}")
                self._receive(sock, started=bool(start))
            head, self._received = self._received[:end], self._received[end + 4 :]
            first, *lines = head.split(b"\r\n")
            version, _, rest = first.partition(b" ")
            code = rest[:3]
            if version not in (b"HTTP/1.1", b"HTTP/1.0") or not code.isdigit() or rest[3:4].strip():
                raise ValueError(f"not an HTTP response: {first[:80]!r}")
            status = int(code)
        pairs = (line.decode("latin-1").partition(":") for line in lines)
        return status, version, {name.lower(): value.strip() for name, _, value in pairs}

    def _body(self, sock: socket.socket, headers: Mapping[str, str]) -> tuple[bytes, bool]:
        """Read the body. Return also whether the connection's end marks the end of the body."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunks(sock), False
        length = headers.get("content-length")
        if length is None:
            body = bytearray(self._received)
            self._received = b""
            while part := self._receive_part(sock):
                body += part
                self._require_bounded(len(body))
            return bytes(body), True
        if not length.isdecimal():
            raise ValueError(f"invalid Content-Length {length[:80]!r}")
        return self._exactly(sock, int(length)), False

    def _chunks(self, sock: socket.socket) -> bytes:
        body = bytearray()
        while size := int(self._line(sock).partition(b";")[0], 16):
            body += self._exactly(sock, size)
            self._require_bounded(len(body))
            self._line(sock)
        while self._line(sock):
            pass  # trailers
        return bytes(body)

    def _line(self, sock: socket.socket) -> bytes:
        while (end := self._received.find(b"\n")) < 0:
            if len(self._received) > _MAX_HEAD_BYTES:
                raise ValueError(f"a line is longer than {_MAX_HEAD_BYTES} bytes")
            self._receive(sock, started=True)
        line, self._received = self._received[:end], self._received[end + 1 :]
        return line.rstrip(b"\r")

    def _exactly(self, sock: socket.socket, size: int) -> bytes:
        self._require_bounded(size)
        if len(self._received) < size:
            parts, received = [self._received], len(self._received)
            while received < size:
                self._received = b""
                self._receive(sock, started=True)
                parts.append(self._received)
                received += len(self._received)
            self._received = b"".join(parts)
        body, self._received = self._received[:size], self._received[size:]
        return body

    def _receive(self, sock: socket.socket, *, started: bool) -> None:
        part = self._receive_part(sock)
        if not part:
            if started:
                raise ValueError("the response is incomplete")
            raise ConnectionResetError("closed without a response")
        # Bounds informational responses, trailers and the sizes of chunks, too: reading them takes the GIL.
        self._received_bytes += len(part)
        self._require_bounded(max(0, self._received_bytes - _MAX_HEAD_BYTES))
        self._received += part

    def _receive_part(self, sock: socket.socket) -> bytes:
        """Receive what there is, before the end of the exchange."""
        left = self._deadline - time.monotonic()
        if self._receives and left <= 0:
            raise TimeoutError("timed out")
        self._receives += 1
        if self._receives == 1 and self._while_waiting is not None:
            return self._first_part(sock, self._while_waiting)
        self._set_timeout(sock, socket.SO_RCVTIMEO, max(0.0, left))
        return sock.recv(_RECEIVE_BYTES)

    def _first_part(self, sock: socket.socket, while_waiting: Callable[[], float]) -> bytes:
        """Receive the start of the response; call `while_waiting` before each wait for it."""
        while True:
            pause, left = while_waiting(), self._deadline - time.monotonic()
            self._set_timeout(sock, socket.SO_RCVTIMEO, min(pause, max(0.0, left)))
            try:
                return sock.recv(_RECEIVE_BYTES)
            except BlockingIOError:
                if pause >= left:
                    raise

    def _require_bounded(self, size: int) -> None:
        if not 0 <= size <= self._max_answer_bytes:
            raise ValueError(f"the response is longer than {self._max_answer_bytes} bytes")

    def _unreachable(self, error: Exception) -> ExporterUnreachableError:
        reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return ExporterUnreachableError(f"no exporter answers at {shown_url(self.url)}: {reason}")


def exporter_urls(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return the exporter's addresses in the order of the attempts: GPUMEM_EXPORTER_URL, or the defaults."""
    url = environ.get("GPUMEM_EXPORTER_URL", "").strip()
    return (full_url(url),) if url else DEFAULT_URLS


def full_url(url: str) -> str:
    """Return an exporter's URL with its scheme: `node:9844` is `http://node:9844`."""
    return url if "/" in url or ":" not in url else f"http://{url}"


def shown_url(url: str) -> str:
    """Return an exporter's URL for messages, without its password."""
    scheme, separator, rest = full_url(url).rpartition("://")
    return url if scheme == "unix" else f"{scheme}{separator}{rest.rpartition('@')[2]}"


@dataclass(frozen=True)
class _Exporter:
    """The parts of an exporter's URL."""

    address: tuple[str, int] | str
    """Host and port, or the path of a Unix socket."""
    tls: bool = False
    authorization: str = ""

    @property
    def socket_path(self) -> str:
        """The path of the Unix socket; empty for TCP."""
        return self.address if isinstance(self.address, str) else ""


def _exporter(url: str) -> _Exporter:
    invalid = ConfigurationError(
        f"invalid exporter URL {shown_url(url)!r}: expected host:port, http://host:port, https://host:port or "
        "unix:///path/to.sock"
    )
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise invalid from None
    if parts.query or parts.fragment:
        raise invalid
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return _Exporter(parts.path)
    if parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/"):
        tls = parts.scheme == "https"
        return _Exporter((parts.hostname, port or (443 if tls else 80)), tls, _basic(parts.username, parts.password))
    raise invalid


def _basic(user: str | None, password: str | None) -> str:
    if user is None:
        return ""
    import base64  # only for a URL with a password

    return "Basic " + base64.b64encode(f"{unquote(user)}:{unquote(password or '')}".encode()).decode()


def _host(address: tuple[str, int] | str) -> str:
    """Return the value of the header `Host`."""
    if isinstance(address, str):
        return "localhost"
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _connect(exporter: _Exporter, timeout_seconds: float, url: str, trust: Trust) -> socket.socket:
    if isinstance(exporter.address, str):
        sock = socket.socket(socket.AF_UNIX)
    else:
        host, port = exporter.address
        # Bytes, because Python imports a codec for a str. A fork during an import leaves a child that waits forever.
        name = host.encode() if host.isascii() else host
        sock = socket.create_connection((name, port), timeout_seconds)  # type: ignore[arg-type]
    try:
        if isinstance(exporter.address, str):
            sock.settimeout(timeout_seconds)
            sock.connect(exporter.address)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if exporter.tls:
                return over_tls(sock, name, shown_url(url), trust)
    except BaseException:
        sock.close()
        raise
    sock.settimeout(None)
    return sock
