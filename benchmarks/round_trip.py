"""How long an action takes from POST to measured result, and what becomes of one whose reporter has gone.

    python -m benchmarks.round_trip [--json] [--real-gpu]

The reporter is the real one in a process with real torch; it waits for commands in its long poll, once beside a main
thread that waits and once beside one that computes in pure Python and never lets go of the GIL by itself. What
`empty_cache` itself took is subtracted: it belongs to the driver. The same request as a dry run, which reaches no
process, stands beside it.
"""

from __future__ import annotations

import argparse
import json
import random
import socket
import statistics
import sys
import time
from typing import Any
from urllib.parse import urlsplit

from benchmarks.claims import Row, parser, percentile, show
from benchmarks.place import Exporter, Place, open_files
from benchmarks.relay import Relay
from benchmarks.reporters import Stand, report_body
from gpumem_exporter.client._transport import Connection
from tests.emulation.torch_process import TorchProcess
from tests.support.waiting import wait_for

LIMITS_MS = {False: (3.0, 10.0), True: (10.0, 25.0)}
"""Median and p99, by whether the main thread is busy."""
GONE_SECONDS = 1.0
HOLD_SECONDS = 30.0
"""So long would a request be held whose client's end is not noticed."""
CLIENTS = 20
BUSY_SECONDS, BUSY_REST_SECONDS = 0.9, 0.2
"""The main thread computes for so long at a time; nothing is asked in its last moments, nor while it rests."""


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--actions", type=int, default=300, help="of each kind (default: %(default)s)")
    options = made.parse_args()
    rows = []
    with Place(real_gpu=options.real_gpu, devices=1) as place:
        exporter = place.exporter()
        for transport, url in (("unix socket", exporter.url), ("TCP", exporter.tcp_url)):
            process = place.torch(GPUMEM_EXPORTER_URL=url)
            process.call("random_heap", keep=0.2)
            process.call("start_client")
            exporter.wait_for_processes(process.pid)
            for busy in (False, True):
                rows += round_trips(options, process, url, transport, busy=busy)
            process.close()
            wait_for(lambda: not exporter.processes(), "the process to be forgotten")
    with Place(real_gpu=options.real_gpu, devices=1) as place:
        exporter = place.exporter("--report.interval", str(HOLD_SECONDS), "--report.expiry", str(10 * HOLD_SECONDS))
        rows += gone_clients(exporter)
    with Place(real_gpu=options.real_gpu, devices=1) as place:
        rows += lost_replies(options, place)
    return show("round trip", rows, as_json=options.json)


def round_trips(
    options: argparse.Namespace, process: TorchProcess, url: str, transport: str, *, busy: bool
) -> list[Row]:
    """Actions at random moments, each when the last one's result has long been taken."""
    client = Connection(url, timeout_seconds=30)
    whole, own, dry = [], [], []
    turn = 0
    while turn < options.actions:
        computing = process.send("exec", code=_BUSY, seconds=BUSY_SECONDS) if busy else None
        end = time.monotonic() + BUSY_SECONDS - 0.25
        while turn < options.actions and time.monotonic() < end:
            turn += 1
            time.sleep(random.uniform(0.03, 0.09))
            took, action = _act(client, process.pid, dry_run=True)
            dry.append(1e3 * took)
            if computing is None:
                process.exec("scratch = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]")
                process.exec("del scratch")
            time.sleep(random.uniform(0.03, 0.09))
            took, action = _act(client, process.pid, dry_run=False)
            (result,) = action["results"]
            if result["outcome"] != "done" or (computing is None and not result["freed_bytes"]):
                raise RuntimeError(f"an action came to nothing: {action}")
            whole.append(1e3 * (took - result["duration_seconds"]))
            own.append(1e3 * result["duration_seconds"])
        if computing is not None:
            process.receive(computing)
            time.sleep(BUSY_REST_SECONDS)
    client.close()
    name = f"{transport}, main thread {'busy' if busy else 'idle'}"
    limits = LIMITS_MS[busy]
    median = statistics.median(whole)
    floor = statistics.median(dry)
    return [
        Row(f"{name}: median", median, "ms", limits[0], f"a dry run ({floor:.2f} ms)", median / floor),
        Row(f"{name}: p90", percentile(whole, 0.9), "ms"),
        Row(f"{name}: p99", percentile(whole, 0.99), "ms", limits[1]),
        Row(f"{name}: empty_cache() itself, median", statistics.median(own), "ms"),
    ]


_BUSY = """
import time
end = time.monotonic() + seconds
while time.monotonic() < end:
    x = 0
    for i in range(2000):
        x += i * i
"""


def _act(client: Connection, pid: int, *, dry_run: bool) -> tuple[float, dict[str, Any]]:
    body = {"action": "empty_cache", "target": {"pid": pid}, "wait_seconds": 10, "dry_run": dry_run}
    sent = json.dumps(body).encode()
    begun = time.perf_counter()
    answer = client.request("POST", "/api/v1/actions", sent, {"Content-Type": "application/json"})
    took = time.perf_counter() - begun
    if answer.status != 200:
        raise RuntimeError(f"an action was answered {answer.status}: {answer.body!r}")
    return took, json.loads(answer.body)


def gone_clients(exporter: Exporter) -> list[Row]:
    """Reporters that are killed while their requests are held, and clients that no longer wait for their action."""
    port = urlsplit(exporter.tcp_url).port or 80
    uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
    before = open_files(exporter.pid)
    with Stand(CLIENTS) as stand:
        held = [
            _ask(port, "/api/v1/reports", report_body(pid, uuids[:1], hold_seconds=HOLD_SECONDS)) for pid in stand.pids
        ]
        wait_for(lambda: len(exporter.processes()) == CLIENTS, "the reports")
        waiting = {"action": "reset_peak", "target": {"pid": stand.pids[0]}, "wait_seconds": HOLD_SECONDS}
        held[0].close()  # whoever waits for this process' command waits in vain
        held += [_ask(port, "/api/v1/actions", json.dumps(waiting).encode()) for _ in range(CLIENTS)]
        wait_for(lambda: len(exporter.get("/api/v1/actions")["actions"]) == CLIENTS, "the actions")
    begun = time.perf_counter()
    for client in held:
        client.close()
    wait_for(lambda: open_files(exporter.pid) <= before, "the connections to be closed")
    closed = time.perf_counter() - begun
    wait_for(lambda: not exporter.processes(), "the processes to be forgotten")
    forgotten = time.perf_counter() - begun
    beside = f"held for {HOLD_SECONDS:g} s where that goes unnoticed"
    return [
        Row(f"{CLIENTS} reporters killed in their long poll: nothing held after", forgotten, "s", GONE_SECONDS, beside),
        Row("their and as many waiting clients' connections closed after", closed, "s", GONE_SECONDS),
    ]


def lost_replies(options: argparse.Namespace, place: Place) -> list[Row]:
    """Commands that went to a client which died with them, and that came while a client had just gone."""
    exporter = place.exporter()
    turns = max(10, options.actions // 10)
    rows = []
    with Relay(place.folder, exporter.socket) as relay:
        process = place.torch(GPUMEM_EXPORTER_URL=relay.url)
        process.call("random_heap")
        process.call("start_client")
        exporter.wait_for_processes(process.pid)
        client = Connection(exporter.url, timeout_seconds=60)
        for what in ("whose first taker dies with it", "given just after its taker has gone"):
            lost, took = 0, []
            for _ in range(turns):
                time.sleep(random.uniform(0.05, 0.1))
                if "dies" in what:
                    relay.lose_next(lambda answer: b'"commands"' in answer)
                else:
                    relay.cut()
                seconds, action = _act(client, process.pid, dry_run=False)
                lost += action["state"] != "done"
                took.append(seconds)
                if "dies" in what and not relay.lost.is_set():
                    raise RuntimeError("the relay lost no answer: this was no test")
            rows.append(Row(f"commands lost, of {turns} {what}", lost, "", 1))
            rows.append(Row(f"round trip of a command {what}, median", 1e3 * statistics.median(took), "ms"))
        client.close()
        process.close()
    return rows


def _ask(port: int, path: str, body: bytes) -> socket.socket:
    """Send a request and leave the answer where it is."""
    client = socket.create_connection(("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return client


if __name__ == "__main__":
    sys.exit(main())
