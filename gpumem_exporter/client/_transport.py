"""HTTP to the exporter over TCP or a unix socket, on the standard library's `http.client`."""

from __future__ import annotations

import contextlib
import http.client
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from gpumem_exporter.errors import ConfigurationError, ExporterUnreachableError

__all__ = ["MAX_ANSWER_BYTES", "Answer", "Connection"]

MAX_ANSWER_BYTES = 64 << 20
"""No honest answer is longer; a longer one counts as no answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An HTTP answer, whole. Header names are lower case."""

    status: int
    headers: Mapping[str, str]
    body: bytes


class Connection:
    """One kept-alive connection to an exporter. Not thread-safe, but for `interrupt`.

    Args:
        url: `http://host:port` or `unix:///path/to.sock`.
        timeout_seconds: for connecting, and for each wait for the exporter's next bytes.

    Raises:
        ConfigurationError: the URL is neither of the two forms.
    """

    def __init__(self, url: str, *, timeout_seconds: float) -> None:
        self.url = url
        self._timeout_seconds = timeout_seconds
        self._http = _connection_for(url, timeout_seconds)
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
            ExporterUnreachableError: nobody answers, not in time, or not in HTTP.
        """
        reused = self._http.sock is not None
        try:
            return self._exchange(method, path, body, headers or {}, timeout_seconds or self._timeout_seconds)
        except (ConnectionError, http.client.BadStatusLine) as error:
            self.close()
            if not reused or self._interrupted:
                raise self._unreachable(error) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise self._unreachable(error) from error
        try:
            return self._exchange(method, path, body, headers or {}, timeout_seconds or self._timeout_seconds)
        except (OSError, http.client.HTTPException, ValueError) as error:
            self.close()
            raise self._unreachable(error) from error

    def interrupt(self) -> None:
        """Make a `request` that waits in another thread fail now, and all later ones. Any thread may call this."""
        self._interrupted = True
        sock = self._http.sock
        if sock is not None:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the connection; the next request opens another."""
        self._http.close()

    def _exchange(
        self, method: str, path: str, body: bytes | None, headers: Mapping[str, str], timeout_seconds: float
    ) -> Answer:
        connection = self._http
        if connection.sock is None and not self._interrupted:
            connection.connect()
        # Asked once the socket can be seen: `interrupt` sets this before it looks for the socket, so that one of the
        # two always notices the other.
        if self._interrupted:
            raise ConnectionAbortedError("interrupted")
        connection.sock.settimeout(timeout_seconds)
        connection.request(method, path, body=body, headers=dict(headers))
        with connection.getresponse() as response:
            content = response.read(MAX_ANSWER_BYTES + 1)
            if len(content) > MAX_ANSWER_BYTES:
                raise http.client.HTTPException(f"an answer of over {MAX_ANSWER_BYTES} bytes")
            if response.length:  # read(n) leaves it to the caller to see that the end is missing
                raise http.client.IncompleteRead(content, response.length)
            answer = Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, content)
            if response.will_close:
                self.close()
        return answer

    def _unreachable(self, error: Exception) -> ExporterUnreachableError:
        return ExporterUnreachableError(f"no exporter answers at {self.url}: {str(error) or type(error).__name__}")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, timeout_seconds: float) -> None:
        super().__init__("localhost", timeout=timeout_seconds)
        self._path = path

    def connect(self) -> None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(self.timeout)
            sock.connect(self._path)
        except BaseException:
            sock.close()
            raise
        self.sock = sock


def _connection_for(url: str, timeout_seconds: float) -> http.client.HTTPConnection:
    wrong = ConfigurationError(f"exporter URL {url!r}: expected http://host:port or unix:///path/to.sock")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        raise wrong from None
    if parts.query or parts.fragment:
        raise wrong
    if parts.scheme == "unix" and not parts.netloc and parts.path.startswith("/"):
        return _UnixConnection(parts.path, timeout_seconds)
    if parts.scheme == "http" and parts.hostname and parts.path in ("", "/") and parts.username is None:
        return http.client.HTTPConnection(parts.hostname, port or 80, timeout=timeout_seconds)
    raise wrong
