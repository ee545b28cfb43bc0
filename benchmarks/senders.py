"""What it costs the exporter to know who sends a report.

    python -m benchmarks.senders [--quick] [--json]

The kernel is asked for the user of each new connection, which is compared with opening and accepting the connection.
On the unix socket the place of the process is read too: its namespaces and its cgroup. The first report
of a connection is decided with /proc, which is compared with reading the report: over loopback it reads the descriptors
of the process as well. So are all later reports, whose decision is known.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.claims import Options, Progress, Row, compared, show, typical
from benchmarks.reporters import report_body
from gpumem_exporter.host.linux import LinuxHost
from gpumem_exporter.server.api.report_schema import ReportReader
from gpumem_exporter.server.http.peer import Peer
from gpumem_exporter.server.security.report_sender import ReportSenders

CONNECTION_RATIOS = {"loopback": 2.0, "unix socket": 6.0}
FIRST_RATIO = 15.0
LATER_RATIO = 0.1
UUIDS = ("GPU-00000000-0000-0000-0000-000000000000",)


def main() -> int:
    options = Options(__doc__)
    options.amount("--reports", 5000, 500, "reports of each kind")
    given = options.read()
    progress = Progress("senders", 2)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name, listener in (("loopback", _loopback()), ("unix socket", _unix(Path(folder) / "socket"))):
            progress.part(name)
            with listener:
                rows += senders(name, listener, given.reports)
    return show("senders", rows, as_json=given.json)


def senders(name: str, listener: socket.socket, count: int) -> list[Row]:
    """The cost of each step, for reports of this process."""
    body = report_body(os.getpid(), UUIDS, hold_seconds=0.0)
    reader = ReportReader()
    identity = reader.read(body).process
    deciding = ReportSenders(LinuxHost(), clock=time.monotonic, max_known=1000)
    opened, identified, read, first, later = [], [], [], [], []

    async def reports() -> None:
        for _ in range(count):
            started = time.perf_counter()
            with socket.socket(listener.family) as client:
                client.connect(listener.getsockname())
                accepted, _ = listener.accept()
                opened.append(time.perf_counter() - started)
                with accepted:
                    started = time.perf_counter()
                    peer = Peer.of_socket(accepted)
                    identified.append(time.perf_counter() - started)
                    started = time.perf_counter()
                    reader.read(body)
                    read.append(time.perf_counter() - started)
                    for seconds in (first, later):
                        started = time.perf_counter()
                        await deciding.identify(identity, peer)
                        seconds.append(time.perf_counter() - started)

    asyncio.run(reports())
    reading = typical(read)
    return [
        compared(
            f"user of a connection, {name}",
            *(typical(identified), "s", "opening the connection", typical(opened), CONNECTION_RATIOS[name]),
        ),
        compared(f"first report, {name}", typical(first), "s", "reading the report", reading, FIRST_RATIO),
        compared(f"later report, {name}", typical(later), "s", "reading the report", reading, LATER_RATIO),
    ]


def _loopback() -> socket.socket:
    return socket.create_server(("127.0.0.1", 0))


def _unix(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    return listener


if __name__ == "__main__":
    sys.exit(main())
