"""What a request costs the exporter, how long an action takes to its measured result, and what if its reporter dies.

    python -m benchmarks.round_trip [--quick] [--json] [--real-gpu]

Reports and dry runs, which wait for nothing, are compared with the same POST to a constant route of the same kind of
server, in turns: the time until the reply, and CPU of the server. Over loopback the kernel names the sender by its
socket, and on the unix socket by its process. The exporter is not scraped meanwhile: in the seconds before a scrape, a
report also renders its lines of the page.

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
from typing import Any
from urllib.parse import urlsplit

from benchmarks.claims import Options, Progress, Row, compared, percentile, show, typical
from benchmarks.constant import ConstantServer
from benchmarks.place import Http, Place, cpu_seconds, open_files
from benchmarks.relay import Relay
from benchmarks.reporters import Stand, report_bodies, report_body
from gpumem_client.wire.protocol import REPORTS_PATH
from gpumem_exporter.server.security.request_guard import ACTIONS_PATH
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

LOOPBACK_RATIO = 2.0
UNIX_RATIO = 2.5
"""The same work takes a larger share there, because the unix socket costs both servers less than TCP."""
REPORT_CPU_RATIO = 3.0
IDLE_RATIO = 12.0
BUSY_RATIO = 5.0
GONE_RATIO = 0.2
HOLD_SECONDS = 30.0
"""The time for which the exporter holds a request if it does not notice that the client disconnected."""
CLIENTS = 20
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
    progress = Progress("round_trip", 2 * len(transports) + 5)
    rows = []
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        rows += requests(given, progress, place)
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
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        progress.part(f"{CLIENTS} clients that are killed")
        exporter = place.exporter("--report.interval", str(HOLD_SECONDS), "--report.expiry", str(10 * HOLD_SECONDS))
        rows += gone_clients(exporter)
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        rows += lost_replies(given, progress, place)
    return show("round trip", rows, as_json=given.json)


def requests(given: argparse.Namespace, progress: Progress, place: Place) -> list[Row]:
    """Reports that ask for an immediate reply, and dry runs of a clear of one process, which wait for no process."""
    exporter = place.exporter()
    stand = place.stack.enter_context(Stand(1))
    constant = place.stack.enter_context(ConstantServer(place.folder, 64))
    uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
    reports = report_bodies(stand.pids[0], uuids[:1])
    clear = json.dumps({"action": "empty_cache", "target": {"pid": stand.pids[0]}, "dry_run": True}).encode()
    user = "root" if os.geteuid() == 0 else f"uid {os.geteuid()}"
    transports = (
        (f"loopback as {user}", exporter.tcp_url, constant.tcp_url, LOOPBACK_RATIO),
        ("unix socket", exporter.url, constant.unix_url, UNIX_RATIO),
    )
    rows = []
    for transport, url, constant_url, ratio in transports:
        progress.part(f"reports and dry runs, {transport}")
        client, beside = Http(url), Http(constant_url)
        kinds = {
            "report": _Requests(exporter.pid, client, REPORTS_PATH, reports),
            "the same POST": _Requests(constant.pid, beside, "/metrics", reports),
            "dry run of a clear": _Requests(exporter.pid, client, ACTIONS_PATH, itertools.repeat(clear)),
            "its POST": _Requests(constant.pid, beside, "/metrics", itertools.repeat(clear)),
        }
        for turn in progress.turns(given.batches + 1):
            for kind in kinds.values():
                kind.batch(warm=turn > 0)
        for name, of in (("report", "the same POST"), ("dry run of a clear", "its POST")):
            what, to, claims = f"{name}, {transport}", "the same POST to a constant route", name == "report"
            measured, base = kinds[name], kinds[of]
            rows += [
                compared(what, typical(measured.wall), "µs", to, typical(base.wall), ratio if claims else None),
                compared(
                    f"{what}: CPU of the server",
                    typical(measured.cpu),
                    "µs",
                    to,
                    typical(base.cpu),
                    REPORT_CPU_RATIO if claims else None,
                ),
            ]
        client.close()
        beside.close()
    return rows


class _Requests:
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
    whole, own, dry, constant, echoes = [], [], [], [], []
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
            dry.append(1e3 * _act(client, process.pid, dry_run=True)[0])
            if computing is None:
                process.exec("scratch = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]")
                process.exec("del scratch")
            time.sleep(random.uniform(0.03, 0.09))
            took, action = _act(client, process.pid, dry_run=False)
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
        Row(f"{name}: dry run, which reaches no process, median", statistics.median(dry), "ms"),
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


def _act(client: Http, pid: int, *, dry_run: bool) -> tuple[float, dict[str, Any]]:
    body = {"action": "empty_cache", "target": {"pid": pid}, "wait_seconds": 10, "dry_run": dry_run}
    took, answer = client.timed("POST", "/api/v1/actions", json.dumps(body).encode())
    return took, json.loads(answer)


def gone_clients(exporter: ExporterProcess) -> list[Row]:
    """Reporters that are killed while their requests are held, and clients that do not wait for their action's end."""
    port = urlsplit(exporter.tcp_url).port or 80
    uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
    before = open_files(exporter.pid)
    with Stand(CLIENTS) as stand:
        held = [
            _ask(port, "/api/v1/reports", report_body(pid, uuids[:1], hold_seconds=HOLD_SECONDS)) for pid in stand.pids
        ]
        wait_for(lambda: len(exporter.processes()) == CLIENTS, "the reports")
        waiting = {"action": "reset_peak", "target": {"pid": stand.pids[0]}, "wait_seconds": HOLD_SECONDS}
        held[0].close()  # no client receives the command of this process
        held += [_ask(port, "/api/v1/actions", json.dumps(waiting).encode()) for _ in range(CLIENTS)]
        wait_for(lambda: len(exporter.get("/api/v1/actions")["actions"]) == CLIENTS, "the actions")
    started = time.perf_counter()
    for client in held:
        client.close()
    wait_for(lambda: open_files(exporter.pid) <= before, "the connections to be closed")
    closed = time.perf_counter() - started
    wait_for(lambda: not exporter.processes(), "the processes to be forgotten")
    forgotten = time.perf_counter() - started
    beside = "the time for which they would be held"
    what = f"{CLIENTS} reporters killed in their long poll: all forgotten after"
    return [
        compared(what, forgotten, "s", beside, HOLD_SECONDS, GONE_RATIO),
        compared(f"their connections and {CLIENTS} others closed after", closed, "s", beside, HOLD_SECONDS, GONE_RATIO),
    ]


def lost_replies(given: argparse.Namespace, progress: Progress, place: Place) -> list[Row]:
    """Commands to a client that died with them, and commands requested just after a client died."""
    exporter = place.exporter()
    count = max(5, given.actions // 10)
    rows = []
    with Relay(place.folder, exporter.socket) as relay:
        process = place.torch(GPUMEM_EXPORTER_URL=relay.url)
        process.call("random_heap")
        process.call("start_client")
        exporter.wait_for_processes(process.pid)
        client = Http(exporter.url)
        for dies, what in ((True, "whose first client dies with it"), (False, "requested just after its client died")):
            progress.part(f"commands {what}")
            lost, took = 0, []
            for _ in progress.turns(count):
                time.sleep(random.uniform(0.05, 0.1))
                if dies:
                    relay.lose_next(lambda answer: b'"commands"' in answer)
                else:
                    relay.cut()
                seconds, action = _act(client, process.pid, dry_run=False)
                lost += action["state"] != "done"
                took.append(seconds)
                if dies and not relay.lost.is_set():
                    raise RuntimeError("the relay lost no reply: nothing was measured")
            rows.append(Row(f"commands lost, of {count} {what}", lost, "", limit=1))
            rows.append(Row(f"round trip of a command {what}, median", 1e3 * statistics.median(took), "ms"))
        client.close()
        process.close()
    return rows


def _ask(port: int, path: str, body: bytes) -> socket.socket:
    """Send a request without reading its reply."""
    client = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


if __name__ == "__main__":
    sys.exit(main())
