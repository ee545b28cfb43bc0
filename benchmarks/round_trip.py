"""What a request costs the exporter, and how long an action takes to its measured result.

    python -m benchmarks.round_trip [--quick] [--json] [--real-gpu]

Reports, which wait for nothing, are compared with the same POST to a constant route of the same kind of
server, in turns: the time until the reply, and CPU of the server. Over loopback the kernel names the sender by its
socket, and on the unix socket by its process. The exporter is not scraped meanwhile: in the seconds before a scrape, a
report also renders its lines of the page.

A dry run over a new connection is compared with a dry run over a new connection to the unix socket, beside 1,300 other
processes of the user. Over loopback, the exporter reads the descriptors of the processes in the caller's cgroup: the
others are in another cgroup, as the processes of another session are, then in the caller's own. The first needs root
and cgroups of version 2.

The reporter of the actions is the real one, in a process with real torch. It waits for commands in its long poll: first
beside a main thread that waits, then beside one that computes in pure Python and never releases the GIL voluntarily.
The time of `empty_cache()` itself is subtracted, because the driver determines it.

An action is compared, in turns, with a GET of the exporter's constant route `/-/healthy`. For the process that
computes, it is also compared with an echo of one byte by a thread of that process, which waits for the GIL as the
reporter does.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from benchmarks.claims import Options, Progress, Row, compared, percentile, show, typical
from benchmarks.constant import ConstantServer
from benchmarks.place import Http, Place, cpu_seconds
from benchmarks.reporters import Stand, report_bodies
from gpumem_client.wire.protocol import REPORTS_PATH
from tests.emulation.torch_process import TorchProcess
from tests.support.waiting import wait_for

LOOPBACK_RATIO = 2.0
UNIX_RATIO = 2.5
"""The same work takes a larger share there, because the unix socket costs both servers less than TCP."""
REPORT_CPU_RATIO = 3.0
IDLE_RATIO = 12.0
BUSY_RATIO = 5.0
NEW_CONNECTION_RATIO = 1.5
OTHER_PROCESSES = 1_300
BATCH = 20
"""The number of requests of one kind, until it is the turn of the next kind."""
BUSY_SECONDS, BUSY_REST_SECONDS = 0.9, 0.2
"""The main thread computes for this time, then pauses. Nothing is requested shortly before and in the pause."""


def main() -> int:
    options = Options(__doc__)
    options.amount("--actions", 200, 30, "actions of each kind")
    options.amount("--batches", 100, 40, f"batches of {BATCH} requests of each kind")
    given = options.read()
    transports = ("unix socket",) if given.quick else ("unix socket", "TCP")
    progress = Progress("round_trip", 2 * len(transports) + 4)
    rows = []
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        rows += requests(given, progress, place)
        rows += new_connections(given, progress, place)
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        exporter = place.exporter()
        for transport in transports:
            url = exporter.url if transport == "unix socket" else exporter.tcp_url
            process = place.torch(GPUMEM_EXPORTER_URL=url)
            process.call("random_heap", keep=0.2)
            process.call("start_client")
            exporter.wait_for_processes(process.pid)
            for busy in (False, True):
                progress.part(f"actions, {transport}, main thread {'busy' if busy else 'idle'}")
                rows += round_trips(given, progress, process, url, transport, busy=busy)
            process.close()
            wait_for(lambda: not exporter.processes(), "the process to be forgotten")
    return show("round trip", rows, as_json=given.json)


def requests(given: argparse.Namespace, progress: Progress, place: Place) -> list[Row]:
    """Reports that ask for an immediate reply."""
    exporter = place.exporter()
    stand = place.stack.enter_context(Stand(1))
    constant = place.stack.enter_context(ConstantServer(place.folder, 64))
    uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
    reports = report_bodies(stand.pids[0], uuids[:1])
    user = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    transports = (
        (f"loopback as {user}", exporter.tcp_url, constant.tcp_url, LOOPBACK_RATIO),
        ("unix socket", exporter.url, constant.unix_url, UNIX_RATIO),
    )
    rows = []
    for transport, url, constant_url, ratio in transports:
        progress.part(f"reports, {transport}")
        client, beside = Http(url), Http(constant_url)
        kinds = (
            Requests(exporter.pid, client, REPORTS_PATH, reports),
            Requests(constant.pid, beside, "/metrics", reports),
        )
        for turn in progress.turns(given.batches + 1):
            for kind in kinds:
                kind.batch(warm=turn > 0)
        what, to = f"report, {transport}", "the same POST to a constant route"
        rows += [
            compared(what, typical(kinds[0].wall), "µs", to, typical(kinds[1].wall), ratio),
            compared(f"{what}: CPU", typical(kinds[0].cpu), "µs", to, typical(kinds[1].cpu), REPORT_CPU_RATIO),
        ]
        client.close()
        beside.close()
    return rows


def new_connections(given: argparse.Namespace, progress: Progress, place: Place) -> list[Row]:
    """Dry runs, each over a new connection."""
    exporter = place.exporter()
    place.stack.enter_context(Stand(OTHER_PROCESSES))
    rows = []
    for own in (True, False):
        progress.part(f"new connections, {'own' if own else 'shared'} cgroup")
        with _own_cgroup() if own else nullcontext(True) as entered:
            if not entered:
                continue
            taken: dict[str, list[float]] = {exporter.tcp_url: [], exporter.url: []}
            for turn in progress.turns(given.batches + 1):
                for url, each in taken.items():
                    client = Http(url)
                    body = json.dumps({"action": "empty_cache", "target": {"all": True}, "dry_run": True}).encode()
                    seconds, _ = client.timed("POST", "/api/v1/actions", body)
                    client.close()
                    if turn:  # the first one finds the cgroup
                        each.append(1e3 * seconds)
        where = "another" if own else "the same"
        what = f"dry run, new loopback connection, {OTHER_PROCESSES} processes in {where} cgroup"
        loopback, unix = map(typical, taken.values())
        rows.append(compared(what, loopback, "ms", "unix socket", unix, NEW_CONNECTION_RATIO if own else None))
    return rows


@contextmanager
def _own_cgroup() -> Iterator[bool]:
    """Move this process into a cgroup of its own; the value is whether that is permitted."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    root = next((Path(mount[1]) for mount in mounts if mount[2] == "cgroup2"), None)
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    before = next((line.removeprefix("0::/") for line in lines if line.startswith("0::")), None)
    if root is None or before is None:
        yield False
        return
    own = root / f"gpumem-benchmark-{os.getpid()}"
    try:
        own.mkdir()
    except OSError:
        yield False
        return
    try:
        (own / "cgroup.procs").write_text("0")
        yield True
    finally:
        (root / before / "cgroup.procs").write_text("0")
        own.rmdir()


class Requests:
    """Requests of one kind on one connection, in batches.

    Attributes:
        cpu: microseconds of CPU of the server per request, of each batch.
        wall: microseconds until the reply, of each request.
    """

    def __init__(self, server: int, client: Http, path: str, bodies: Iterator[bytes]) -> None:
        self.cpu: list[float] = []
        self.wall: list[float] = []
        self._server = server
        self._client = client
        self._path = path
        self._bodies = bodies

    def batch(self, *, warm: bool) -> None:
        """Send a batch of requests. The first batch is not counted: the connection is new."""
        bodies = list(itertools.islice(self._bodies, BATCH))
        before = cpu_seconds(self._server)
        wall = [1e6 * self._client.timed("POST", self._path, body)[0] for body in bodies]
        if warm:
            self.wall += wall
            self.cpu.append(1e6 * (cpu_seconds(self._server) - before) / BATCH)


def round_trips(
    given: argparse.Namespace, progress: Progress, process: TorchProcess, url: str, transport: str, *, busy: bool
) -> list[Row]:
    """Actions at random times, each after the result of the previous one."""
    client = Http(url)
    echo = _Echo(process) if busy else None
    whole, own, constant, echoes = [], [], [], []
    turns = progress.turns(given.actions)
    left = given.actions
    while left:
        computing = process.send("exec", code=_BUSY, seconds=BUSY_SECONDS) if busy else None
        end = time.monotonic() + BUSY_SECONDS - 0.25
        while left and time.monotonic() < end:
            next(turns)
            left -= 1
            time.sleep(random.uniform(0.03, 0.09))
            constant.append(1e3 * client.timed("GET", "/-/healthy")[0])
            if echo is not None:
                echoes.append(1e3 * echo.seconds())
            if computing is None:
                process.exec("scratch = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]")
                process.exec("del scratch")
            time.sleep(random.uniform(0.03, 0.09))
            took, action = _act(client, process.pid)
            (result,) = action["results"]
            if result["outcome"] != "done" or (computing is None and not result["freed_bytes"]):
                raise RuntimeError(f"an action freed nothing: {action}")
            whole.append(1e3 * (took - result["duration_seconds"]))
            own.append(1e3 * result["duration_seconds"])
        if computing is not None:
            process.receive(computing)
            time.sleep(BUSY_REST_SECONDS)
    client.close()
    name = f"action, {transport}, main thread {'busy' if busy else 'idle'}"
    rows = [
        compared(name, typical(whole), "ms", "GET /-/healthy", typical(constant), None if busy else IDLE_RATIO),
        Row(f"{name}: p99", percentile(whole, 0.99), "ms"),
        Row(f"{name}: empty_cache() itself, median", statistics.median(own), "ms"),
    ]
    if echo is not None:
        echo.close()
        beside = "an echo by a thread of that process"
        rows.insert(1, compared(f"{name}: the same", typical(whole), "ms", beside, typical(echoes), BUSY_RATIO))
    return rows


class _Echo:
    """A connection to a thread of the process that returns each byte."""

    def __init__(self, process: TorchProcess) -> None:
        port = process.exec("from benchmarks import inside; result = inside.serve_echo()")
        self._socket = socket.create_connection(("127.0.0.1", port))
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def seconds(self) -> float:
        """Send one byte and wait for it."""
        started = time.perf_counter()
        self._socket.sendall(b"x")
        self._socket.recv(1)
        return time.perf_counter() - started

    def close(self) -> None:
        self._socket.close()


_BUSY = """
import time
end = time.monotonic() + seconds
while time.monotonic() < end:
    x = 0
    for i in range(2000):
        x += i * i
"""


def _act(client: Http, pid: int) -> tuple[float, dict[str, Any]]:
    body = {"action": "empty_cache", "target": {"pid": pid}, "wait_seconds": 10}
    took, answer = client.timed("POST", "/api/v1/actions", json.dumps(body).encode())
    return took, json.loads(answer)


if __name__ == "__main__":
    sys.exit(main())
