"""An engine's HTTP server and its process on a device, as two processes of one user. Standard library only.

    engine_server.py NAME ANSWERS [OPTION…]

Its command line has the engine's name and options. ANSWERS is a JSON object: "GET /path" to [status, body] or a list of
them, of which the last one repeats; "hang", "huge" and "redirect" stand for those answers. It listens on PORT, and
CHILD_UID is the user of the child. The server writes a JSON line with its port and the pid of its child, and then one
for each request: method, path, body, headers.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import sys
import time

ANSWERS = json.loads(sys.argv[2])


def say(value: object) -> None:
    """Write a JSON line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as told."""

    protocol_version = "HTTP/1.1"

    def handle_any(self) -> None:
        """Tell what arrived, and answer."""
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        headers = {name.lower(): value for name, value in self.headers.items()}
        say([self.command, self.path, body, headers])
        answers = ANSWERS.get(f"{self.command} {self.path}", [404, {"detail": "Not Found"}])
        if isinstance(answers[0], list):
            answers = answers.pop(0) if len(answers) > 1 else answers[0]
        status, content = answers
        if content == "hang":
            time.sleep(600)
        self.send_response(status)
        if content == "redirect":
            self.send_header("Location", "http://127.0.0.1:1/")
            content = ""
        text = "x" * (8 << 20) if content == "huge" else content if isinstance(content, str) else json.dumps(content)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        try:
            self.wfile.write(text.encode())
        except OSError:
            self.close_connection = True

    do_GET = do_POST = handle_any  # noqa: N815 - the names of http.server

    def log_message(self, *_: object) -> None:
        """Write nothing."""


def main() -> None:
    """Serve until the standard input ends."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", int(os.environ["PORT"])), Handler)
    child = os.fork()
    if child == 0:
        server.socket.close()
        if "CHILD_UID" in os.environ:
            os.setuid(int(os.environ["CHILD_UID"]))
        while os.getppid() != 1:
            time.sleep(0.2)
        os._exit(0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    say([server.server_address[1], child])
    server.serve_forever()


if __name__ == "__main__":
    main()
