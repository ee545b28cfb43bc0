"""A reverse proxy that serves an exporter below a path, as an ingress does."""

from __future__ import annotations

import contextlib
import http.client
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

from tests.support.servers.http_servers import serving
from tests.support.waiting import patient

_OWN = frozenset(("connection", "content-length", "date", "server", "transfer-encoding"))


@dataclass(frozen=True)
class PrefixProxy:
    """A running proxy."""

    tcp_url: str
    """The URL of the exporter below it, with the path."""


@contextlib.contextmanager
def prefix_proxy(upstream: str, prefix: str) -> Iterator[PrefixProxy]:
    """Serve the exporter of a URL below `prefix`, which starts with a slash. Every other path is not found."""
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
        yield PrefixProxy(f"http://127.0.0.1:{server.server_port}{prefix}")
