"""HTTP servers of the tests, in a thread; one of them is a proxy as an ingress is."""

from __future__ import annotations

import http.client
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from tests.support.waiting import patient

_OWN = frozenset(("connection", "content-length", "date", "server", "transfer-encoding"))


class _UnixServer(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True

    def handle_error(self, *_: Any) -> None:
        """Write nothing about clients that disconnect."""


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler], path: Path | None = None) -> Iterator[Any]:
    """Answer requests to a free port of 127.0.0.1, or to the unix socket of a path, silently."""
    handler.log_message = lambda *_: None  # type: ignore[assignment]
    with _UnixServer(str(path), handler) if path else ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join(patient(30))


@contextmanager
def prefix_proxy(upstream: str, prefix: str) -> Iterator[SimpleNamespace]:
    """Serve the exporter of a URL below `prefix`, which starts with a slash. Every other path is not found.

    Yields the URL of the exporter below the proxy, as `tcp_url`.
    """
    host, port = urlsplit(upstream).hostname, urlsplit(upstream).port

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            if not self.path.startswith(f"{prefix}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            connection = http.client.HTTPConnection(host or "", port, timeout=patient(30))
            try:
                sent = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
                forwarded = {**sent, "X-Forwarded-For": self.client_address[0], "X-Forwarded-Prefix": prefix}
                connection.request(self.command, self.path.removeprefix(prefix), body or None, forwarded)
                reply = connection.getresponse()
                content = reply.read()
            finally:
                connection.close()
            self.send_response(reply.status)
            for name, value in reply.getheaders():
                if name.lower() not in _OWN:
                    self.send_header(name, value)
            if reply.status != 304:
                self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST = do_DELETE = forward  # noqa: N815 - the names that the class calls

    with serving(Handler) as server:
        yield SimpleNamespace(tcp_url=f"http://127.0.0.1:{server.server_port}{prefix}")
