"""What the requests of one user cost another one: memory of the exporter, lost scrapes, the longest scrape.

    sudo python -m benchmarks.floods [--quick] [--json]

For each flood, an exporter with 64 reporting processes on 8 devices is started. A process of another user attacks it
over loopback, while root scrapes it over loopback. Scrapes are compared with those before the flood. Needs root, which
can start a process of another user.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.claims import Options, Progress, Row, compared, percentile, show, typical
from benchmarks.place import Http, Place
from gpumem_exporter.wire.protocol import REPORTS_PATH, to_wire
from tests.support.builders import UUIDS, report, sample
from tests.support.exporter_process import ExporterProcess
from tests.support.other_user import OTHER_UID

REPORTERS = 64
MEMORY_MIB = 160.0
PAUSE_SECONDS = 0.05
FILES = 12_000
_HEAD = b"POST /api/v1/reports HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
_GET = b"GET %b HTTP/1.1\r\nHost: localhost\r\n\r\n"


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--seconds", 20.0, 5.0, "seconds of each flood")
    given = options.read()
    if os.geteuid() != 0:
        options.parser.error("only root can start the process of another user")
    progress = Progress("floods", len(FLOODS))
    rows = [row for name in FLOODS for row in measure(progress, name, given.seconds)]
    return show("floods", rows, as_json=given.json)


def measure(progress: Progress, name: str, seconds: float) -> list[Row]:
    """One flood."""
    progress.part(name)
    with Place(real_gpu=False, devices=8) as place:
        exporter = place.exporter("--report.expiry", "3600", "--report.interval", "600")
        _fill(exporter)
        before = [scrape(exporter.tcp_url) or 0.0 for _ in range(20)]
        place.start(_attack, name, urlsplit(exporter.tcp_url).port, seconds)
        time.sleep(1.0)  # until it has started
        scrapes: list[float | None] = []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            scrapes.append(scrape(exporter.tcp_url))
            progress.sleep(PAUSE_SECONDS)
        answered = [taken for taken in scrapes if taken is not None]
        base = 1e3 * typical(before)
        return [
            Row(f"{name}: peak memory", _peak_bytes(exporter.pid) / 2**20, "MiB", limit=MEMORY_MIB),
            Row(f"{name}: lost scrapes, of {len(scrapes)}", len(scrapes) - len(answered), "", limit=1),
            compared(f"{name}: scrape, median", 1e3 * percentile(answered, 0.5), "ms", "before", base),
            compared(f"{name}: longest scrape", 1e3 * max(answered), "ms", "before", base),
        ]


def scrape(url: str) -> float | None:
    """Return the seconds of a scrape on a new connection; None if it fails."""
    client = Http(url)
    try:
        return client.timed("GET", "/metrics")[0]
    except (OSError, RuntimeError, http.client.HTTPException):
        return None
    finally:
        client.close()


def _fill(exporter: ExporterProcess) -> None:
    """Let 64 processes report, whose page has 2.5 MB."""
    names = {f"phase {number} {'x' * 100}": 1 for number in range(16)}
    devices = tuple(dataclasses.replace(sample(uuid, 1), phase_peak_bytes=names) for uuid in UUIDS)
    uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
    devices = tuple(dataclasses.replace(each, uuid=uuid) for each, uuid in zip(devices, uuids, strict=True))
    for pid in range(100_000, 100_000 + REPORTERS):
        answer = exporter.request("POST", REPORTS_PATH, to_wire(report(pid, devices=devices)))
        if answer.status != 200:
            raise RuntimeError(f"a report was answered {answer.status}: {answer.body!r}")


def _peak_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmHWM:"))


def _attack(name: str, port: int, seconds: float) -> None:
    """Attack in this process, as the other user."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))
    os.setgroups([])
    os.setgid(OTHER_UID)
    os.setuid(OTHER_UID)
    end = time.monotonic() + seconds + 2
    while time.monotonic() < end:
        FLOODS[name](port, end)


def _connect(port: int) -> socket.socket:
    sock = socket.socket()
    sock.settimeout(10)
    sock.connect(("127.0.0.1", port))
    return sock


def _connections(count: int, sent: bytes) -> Callable[[int, float], None]:
    """Open connections, send something on each, and keep them open."""

    def attack(port: int, end: float) -> None:
        opened = []
        for _ in range(count):
            try:
                opened.append(_connect(port))
                opened[-1].sendall(sent)
            except OSError:
                continue
        time.sleep(min(5.0, max(0.0, end - time.monotonic())))

    return attack


def _requests(clients: int, sent: bytes) -> Callable[[int, float], None]:
    """Send requests, each as soon as the reply to the previous one starts."""

    def one(port: int, end: float) -> None:
        while time.monotonic() < end:
            try:
                with _connect(port) as sock:
                    while time.monotonic() < end:
                        sock.sendall(sent)
                        if not sock.recv(1 << 20):
                            break
            except OSError:
                time.sleep(0.05)

    def attack(port: int, end: float) -> None:
        threads = [threading.Thread(target=one, args=(port, end), daemon=True) for _ in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, end - time.monotonic()))

    return attack


def _report(document: object) -> bytes:
    body = json.dumps(document).encode()
    return _HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body


_TRUE = to_wire(report(1, devices=(sample(),)))
FLOODS = {
    "10,000 silent connections": _connections(10_000, b""),
    "1,600 connections with one byte": _connections(1600, b"G"),
    "150 clients that read no page": _connections(150, _GET % b"/metrics" * 4),
    "600 half-sent bodies": _connections(600, _HEAD + b"Content-Length: 1000000\r\n\r\n" + b" " * 900_000),
    "100 senders of invalid reports": _requests(100, _report({**_TRUE, "devices": [None] * 160_000})),
    "100 senders of nested reports": _requests(100, _report({**_TRUE, "ooms": [{}] * 8000})),
    "20 readers of the processes": _requests(20, _GET % b"/api/v1/processes"),
    "20 readers of the events": _requests(20, _GET % b"/api/v1/events?limit=1000"),
    "50 scrapers": _requests(50, _GET % b"/metrics"),
}


if __name__ == "__main__":
    sys.exit(main())
