"""A server in place of the exporter that records every report and sends the replies that a test sets."""

from __future__ import annotations

import gzip
import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from gpumem_client.profile.profile_types import MAX_COMPRESSED_BYTES
from gpumem_client.wire.protocol import PROFILES_PATH
from tests.support.servers.http_servers import serving


class RecordingExporter:
    """Receives reports on a unix socket and holds each reply for `hold_seconds`.

    It replies after `hold_seconds`, to a final report at once.
    """

    def __init__(self, path: Path, *, hold_seconds: float = 0.0, interval_seconds: float = 0.2) -> None:
        self.url = f"unix://{path}"
        self.reports: list[dict[str, Any]] = []
        self.commands: list[dict[str, Any]] = []
        """The commands of the next reply."""
        self.cancelled: list[str] = []
        """The cancelled commands of each reply."""
        self.profiles: list[dict[str, Any]] = []
        """The memory profiles, as JSON."""
        self.profile_status = 201
        self.refuses: Callable[[dict[str, Any]], bool] = lambda _: False
        """Selects the reports whose reply is 422."""
        self._closing = threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            wbufsize = -1

            def do_POST(self) -> None:
                received = self.rfile.read(int(self.headers["Content-Length"]))
                if self.path == PROFILES_PATH:
                    self._reply(outer.profile_status, outer._keep_profile(received))
                    return
                report = json.loads(received)
                outer.reports.append(report)
                if report["hold_seconds"]:
                    outer._closing.wait(min(hold_seconds, 60.0))
                commands, outer.commands = outer.commands, []
                body = json.dumps(
                    {
                        "commands": commands,
                        "cancelled": outer.cancelled,
                        "report_interval_seconds": interval_seconds,
                    }
                ).encode()
                self._reply(422 if outer.refuses(report) else 200, body)

            def _reply(self, status: int, body: bytes) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                try:
                    self.wfile.write(body)
                    self.wfile.flush()
                except OSError:
                    self.close_connection = True

        self._serving = serving(Handler, path)

    def _keep_profile(self, received: bytes) -> bytes:
        assert len(received) <= MAX_COMPRESSED_BYTES
        profile = json.loads(gzip.decompress(received))
        self.profiles.append(profile)
        return json.dumps({"id": f"kept-{profile['id']}"}).encode()

    def result(self, command_id: str) -> dict[str, Any] | None:
        """Return the result of a command, if a report had it."""
        results = (result for report in self.reports for result in report.get("results", ()))
        return next((result for result in results if result["id"] == command_id), None)

    def __enter__(self) -> RecordingExporter:
        self._serving.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._closing.set()
        self._serving.__exit__(None, None, None)
