"""HTTP to the exporter over TCP, TLS or a Unix socket."""

from __future__ import annotations

import binascii
import contextlib
import io
import math
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Union
from urllib.parse import unquote, urlsplit

from gpumem_client.wire.errors import ConfigurationError, ExporterUnreachableError, ExporterUntrustedError
from gpumem_client.wire.trust import Trust, over_tls

_Address = Union["tuple[str, int]", str]  # host and port, or the path of a Unix socket

DEFAULT_URLS = ("unix:///run/gpumem/exporter.sock", "http://127.0.0.1:9844")
"""The addresses to try, in this order, without GPUMEM_EXPORTER_URL."""
MAX_ANSWER_BYTES = 64 << 20
"""The default of `max_answer_bytes`."""

# What an answer may have besides its body: the headers, and the sizes of chunks.
_MAX_HEAD_BYTES = 64 << 10
_RECEIVE_BYTES = 64 << 10


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
        self._address, self._tls, self._authorization = _parsed(url)
        if self._tls:
            import ssl  # noqa: F401 - now, rather than in the thread that connects
        self._socket: socket.socket | None = None
        self._opened_by = 0
        self.objection = ""
        """Why the server of the last connection receives no credentials; empty if it is accepted."""
        self.interrupted = False
        """Whether `interrupt` was called: every request fails."""

    @property
    def of_another_user(self) -> bool:
        """Whether this process has another user than when it connected, whom the kernel names to the server."""
        return self._socket is not None and self._opened_by != os.geteuid()

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

        If a persistent connection fails, the request is sent once more over a new one. The exporter may therefore
        receive it twice: every request of this project can be repeated.

        `while_waiting` is called before each wait for the start of the response, and returns the seconds after which it
        is called again.

        Raises:
            ExporterUnreachableError: no server answers in time and with HTTP.
            ExporterUntrustedError: the server is not accepted; it has received nothing.
        """
        from http.client import HTTPException  # torch has loaded it; a process without torch needs it for requests only

        headers = {**({"Authorization": self._authorization} if self._authorization else {}), **(headers or {})}
        seconds = timeout_seconds or self._timeout_seconds
        exchange = partial(self._exchange, method, path, body, headers, seconds, while_waiting)
        reused = self._socket is not None
        try:
            try:
                return exchange()
            except OSError as error:
                # A server closes an idle connection at any time, also while the request is on its way. A new connection
                # that fails has a server that does not answer: no second attempt.
                self.close()
                if not reused or self.interrupted or isinstance(error, socket.timeout):
                    raise
                return exchange()
        except ExporterUntrustedError:
            self.close()
            raise
        except (OSError, ValueError, HTTPException) as error:
            self.close()
            reason = getattr(error, "strerror", None) or str(error) or type(error).__name__
            raise ExporterUnreachableError(f"no exporter answers at {shown_url(self.url)}: {reason}") from error

    def interrupt(self) -> None:
        """Make a waiting `request` of another thread, and every later one, fail. Thread-safe."""
        self.interrupted = True
        sock = self._socket
        if sock is not None:
            with contextlib.suppress(OSError):
                # `SSLSocket.shutdown` would end TLS, and a request could continue without it.
                socket.socket.shutdown(sock, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection. The next request opens another."""
        sock, self._socket = self._socket, None
        if sock is not None:
            with contextlib.suppress(OSError):  # the user's code may have closed the descriptor
                sock.close()

    def _exchange(
        self,
        method: str,
        path: str,
        body: bytes | None,
        headers: dict[str, str],
        seconds: float,
        while_waiting: Callable[[], float] | None,
    ) -> Answer:
        from http.client import HTTPResponse

        sock = self._socket
        if sock is None and not self.interrupted:
            self._opened_by = os.geteuid()
            sock = self._socket = self._connect()
            socket_path = self._address if isinstance(self._address, str) else ""
            self.objection = "" if self._tls else self._trust.objection(sock, socket_path)
        # `interrupt` sets the flag, then reads the socket. Here the socket is set, then the flag is read. So either
        # `interrupt` finds the socket or this finds the flag.
        if sock is None or self.interrupted:
            raise ConnectionAbortedError("interrupted")
        if self.objection and (self._trusted_only or "Authorization" in headers):
            raise ExporterUntrustedError(f"the server at {shown_url(self.url)} is not trusted: {self.objection}")
        deadline = time.monotonic() + seconds
        sock.settimeout(seconds)
        # Not by `HTTPConnection`, which tracing libraries replace in part, and which prints tokens at a `debuglevel`.
        host = "localhost"
        if isinstance(self._address, tuple):
            name, port = self._address
            host = f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
        length = {} if body is None else {"Content-Length": str(len(body))}
        fields = {"Host": host, "Accept-Encoding": "identity", **headers, **length}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        if any("\n" in line or "\r" in line for line in lines):
            raise ValueError("a header contains a line break")
        # A server reads one send at once, two in two turns.
        sock.sendall("\r\n".join([*lines, "", ""]).encode("latin-1", "replace") + (body or b""))
        received = _Received(sock, deadline, self._max_answer_bytes, while_waiting)
        response = HTTPResponse(received, method=method)  # type: ignore[arg-type]
        response.begin()
        if response.status < 200:
            raise ValueError(f"status {response.status} is not the end of a response")
        content = bytearray()
        while part := response.read(_RECEIVE_BYTES):
            content += part
            received.require_bounded(len(content))
        if response.length:
            raise ValueError("the response is incomplete")
        if response.will_close:
            self.close()
        return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, bytes(content))

    def _connect(self) -> socket.socket:
        if isinstance(self._address, str):
            sock = socket.socket(socket.AF_UNIX)
        else:
            host, port = self._address
            # Bytes, because Python imports a codec for a str. A child that is forked meanwhile would wait forever.
            name = host.encode() if host.isascii() else host
            sock = socket.create_connection((name, port), self._timeout_seconds)  # type: ignore[arg-type]
        try:
            if isinstance(self._address, str):
                sock.settimeout(self._timeout_seconds)
                sock.connect(self._address)
            else:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls:
                    return over_tls(sock, name, shown_url(self.url), self._trust)
        except BaseException:
            sock.close()
            raise
        return sock


class _Received(io.RawIOBase):
    """The bytes of one response, for an `HTTPResponse`. Each wait ends at the deadline."""

    def __init__(
        self, sock: socket.socket, deadline: float, max_bytes: int, while_waiting: Callable[[], float] | None
    ) -> None:
        self._socket = sock
        self._deadline = deadline
        self._max_bytes = max_bytes
        self._while_waiting = while_waiting
        self._size = 0

    def makefile(self, _mode: str) -> io.BufferedReader:
        return io.BufferedReader(self)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            # Before the first byte only.
            pause = self._while_waiting() if self._while_waiting is not None and not self._size else math.inf
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise socket.timeout("timed out")
            self._socket.settimeout(max(0.001, min(pause, left)))  # a timeout of 0 would be an error at once
            try:
                size = self._socket.recv_into(buffer)
            except socket.timeout:
                continue
            # Bounds informational responses, trailers and the sizes of chunks, too: reading them takes the GIL.
            self._size += size
            self.require_bounded(self._size - _MAX_HEAD_BYTES)
            return size

    def require_bounded(self, size: int) -> None:
        from http.client import HTTPException  # `HTTPResponse` would replace a ValueError

        if size > self._max_bytes:
            raise HTTPException(f"the response is longer than {self._max_bytes} bytes")


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


def _parsed(url: str) -> tuple[_Address, bool, str]:
    """Return the address, whether it needs TLS, and the value of the header `Authorization`."""
    with contextlib.suppress(ValueError):  # an invalid port or IPv6 address
        parts = urlsplit(url)
        tls, port, plain = parts.scheme == "https", parts.port, not parts.query and not parts.fragment
        if plain and parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
            return parts.path, False, ""
        if plain and (tls or parts.scheme == "http") and parts.hostname and parts.path in ("", "/"):
            login = "" if parts.username is None else f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            basic = f"Basic {binascii.b2a_base64(login.encode(), newline=False).decode()}" if login else ""
            return (parts.hostname, port or (443 if tls else 80)), tls, basic
    raise ConfigurationError(
        f"invalid exporter URL {shown_url(url)!r}: expected host:port, http://host:port, https://host:port or "
        "unix:///path/to.sock"
    )
