"""A server in place of the exporter that records every report and sends the replies that a test sets."""

from __future__ import annotations

import http.server
import json
import socketserver
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any


class RecordingExporter:
    """Receives reports on a unix socket and holds each reply for `hold_seconds`.

    It replies after `hold_seconds`, to a final report at once.
    """

    def __init__(self, path: Path, *, hold_seconds: float = 0.0, interval_seconds: float = 0.2) -> None:
        self.url = f"unix://{path}"
        self.reports: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = []
        """The commands of the next reply."""
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _: False
        """Selects the reports whose reply is 422."""
        self._closing = threading.Event()
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self) -> None:
                report = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.reports.append(report)
                if report["hold_seconds"]:
                    outer._closing.wait(min(hold_seconds, 60.0))
                commands, outer.commands = outer.commands, []
                body = json.dumps({"commands": commands, "report_interval_seconds": interval_seconds}).encode()
                self.send_response(422 if outer.refuses(report) else 200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                    self.wfile.flush()
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

            def address_string(self) -> str:
                return "unix"

        class Server(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, *_: Any) -> None:
                pass

        self._server = Server(str(path), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def __enter__(self) -> RecordingExporter:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._server.shutdown()
        self._thread.join(30)
        self._server.server_close()
