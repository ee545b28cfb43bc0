"""What a scrape of a busy node costs: the real exporter in its own process, with 64 reporters at one report a second.

    python -m benchmarks.scrape [--json] [--real-gpu]

In turns with a constant body of the same length from the same kind of server, which is the least it could cost. The
reporters, the server of the constant body and the scraper are processes of their own; on a machine with few CPUs they
compete, and the tails show it. Nothing is pinned to a CPU.
"""

from __future__ import annotations

import argparse
import http.client
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any
from urllib.parse import urlsplit

from benchmarks.claims import Row, parser, percentile, show
from benchmarks.constant import serve_constant
from benchmarks.place import Exporter, Place, cpu_seconds, resident_bytes
from benchmarks.reporters import HELD_BYTES, Stand, probe, report_for_ever
from tests.support.waiting import wait_for

REPORTERS = 64
CLAIMS: dict[bool, tuple[float, float | None]] = {False: (3.0, None), True: (5.0, 3.0)}
"""Median in ms, and its ratio to a constant body, by whether there are several devices."""
PAUSE_SECONDS = 0.05
PROBES_A_SECOND = 50.0


class Scraper:
    """A scraper on one kept-alive connection; times from the request to the last byte of the body."""

    def __init__(self, port: int) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port)

    def scrape(self, **headers: str) -> tuple[float, bytes]:
        """Seconds, and the body."""
        begun = time.perf_counter()
        self._http.request("GET", "/metrics", headers=headers)
        with self._http.getresponse() as response:
            body = response.read()
            taken = time.perf_counter() - begun
            if response.status != 200:
                raise RuntimeError(f"a scrape was answered {response.status}")
        return taken, body


def measure(options: argparse.Namespace, devices: int) -> list[Row]:
    """One node's figures."""
    with ExitStack() as stack:
        place = stack.enter_context(Place(real_gpu=options.real_gpu, devices=devices))
        stand = stack.enter_context(Stand(REPORTERS + 1))
        for pid in stand.pids[: REPORTERS if place.node is not None else 0]:
            for device in range(devices):
                place.node.set_process(pid, device, HELD_BYTES)  # type: ignore[union-attr]
        exporter = place.exporter()
        uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
        _start(stack, report_for_ever, exporter.tcp_url, stand.pids[:REPORTERS], uuids, 1.0)
        wait_for(lambda: len(exporter.processes()) == REPORTERS, f"{REPORTERS} reporting processes")
        scraper = Scraper(urlsplit(exporter.tcp_url).port or 80)
        page = scraper.scrape()[1]
        constant = Scraper(_answered(stack, serve_constant, len(page)))
        series = sum(not line.startswith(b"#") for line in page.splitlines())
        name = f"{REPORTERS} × {len(uuids)}"
        size = f"{name}: {series} series, {len(page) / 1e6:.2f} MB"
        rows = _in_turns(options, name, size, scraper, constant, CLAIMS[len(uuids) > 1])
        rows += _answers_meanwhile(options, name, stack, exporter, stand.pids[-1], uuids, scraper)
        rows += _footprint(options, name, exporter, scraper)
        return rows


def _in_turns(
    options: argparse.Namespace,
    name: str,
    size: str,
    scraper: Scraper,
    constant: Scraper,
    claims: tuple[float, float | None],
) -> list[Row]:
    plain, packed, least = [], [], []
    for _ in range(options.scrapes):
        plain.append(1e3 * scraper.scrape()[0])
        time.sleep(PAUSE_SECONDS)
        least.append(1e3 * constant.scrape()[0])
        time.sleep(PAUSE_SECONDS)
        packed.append(1e3 * scraper.scrape(**{"Accept-Encoding": "gzip"})[0])
        time.sleep(PAUSE_SECONDS)
    floor = statistics.median(least)
    beside = f"a constant body ({floor:.2f} ms, p99 {percentile(least, 0.99):.2f})"
    median = statistics.median(plain)
    return [
        Row(f"{size}: scrape, median", median, "ms", claims[0], beside, median / floor, claims[1]),
        Row(f"{name}: scrape, p99", percentile(plain, 0.99), "ms"),
        Row(f"{name}: scrape with gzip, median", statistics.median(packed), "ms"),
    ]


def _answers_meanwhile(
    options: argparse.Namespace,
    name: str,
    stack: ExitStack,
    exporter: Exporter,
    pid: int,
    uuids: list[str],
    scraper: Scraper,
) -> list[Row]:
    """Reports' answers while one scrape a second is served, plain and gzipped by turns."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    _start(stack, probe, exporter.tcp_url, pid, uuids[:1], options.seconds, PROBES_A_SECOND, sender)
    scrapes: list[tuple[float, float]] = []
    end = time.monotonic() + options.seconds
    while time.monotonic() < end:
        time.sleep(1.0)
        begun = time.monotonic()
        scraper.scrape(**({"Accept-Encoding": "gzip"} if len(scrapes) % 2 else {}))
        scrapes.append((begun, time.monotonic()))
    times = receiver.recv()
    during = [taken for sent, taken in times if any(sent < ended and sent + taken > begun for begun, ended in scrapes)]
    answers = [1e3 * taken for _, taken in times]
    rows = [
        Row(f"{name}: a report's answer, scraped once a second, p99", percentile(answers, 0.99), "ms", 5.0),
        Row(f"{name}: a report's answer, median", statistics.median(answers), "ms"),
    ]
    if during:
        rows.append(Row(f"{name}: the slowest of {len(during)} that met a scrape", 1e3 * max(during), "ms"))
    return rows


def _footprint(options: argparse.Namespace, name: str, exporter: Exporter, scraper: Scraper) -> list[Row]:
    begun, used = time.monotonic(), cpu_seconds(exporter.pid)
    end = begun + options.seconds
    while time.monotonic() < end:
        scraper.scrape(**{"Accept-Encoding": "gzip"})
        time.sleep(min(15.0, max(0.0, end - time.monotonic())))
    share = 100 * (cpu_seconds(exporter.pid) - used) / (time.monotonic() - begun)
    return [
        Row(f"{name}: exporter's CPU, scraped every 15 s with gzip", share, "% of a core"),
        Row(f"{name}: exporter's RSS", resident_bytes(exporter.pid) / 1e6, "MB"),
    ]


def _start(stack: ExitStack, target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
    process.start()
    stack.callback(process.join)
    stack.callback(process.terminate)
    return process


def _answered(stack: ExitStack, target: Callable[..., None], length: int) -> int:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    _start(stack, target, length, sender)
    port: int = _received(receiver)
    return port


def _received(receiver: Connection) -> Any:
    if not receiver.poll(60):
        raise RuntimeError("a process of the benchmark said nothing for 60 s")
    return receiver.recv()


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--scrapes", type=int, default=200, help="scrapes of each kind (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=60.0, help="of each longer part (default: %(default)s)")
    options = made.parse_args()
    rows = measure(options, 1)
    if not options.real_gpu:
        rows += measure(options, 8)
    return show("scrape", rows, as_json=options.json)


if __name__ == "__main__":
    sys.exit(main())
