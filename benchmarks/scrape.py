"""What a scrape of a busy node costs: the real exporter in its own process, with 64 reporters.

    python -m benchmarks.scrape [--quick] [--json] [--real-gpu]

A scrape is compared, in turns, with a constant body of the same length from the same kind of server. The reply to a
report, while the exporter is scraped once a second, is compared with that server's reply to the same POST. The
reporters and both servers are separate processes. On a machine with few CPUs they compete, and the tails show it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time

from benchmarks.claims import Options, Progress, Row, compared, percentile, show, typical
from benchmarks.constant import ConstantServer
from benchmarks.place import Http, Place, cpu_seconds, resident_bytes
from benchmarks.reporters import HELD_BYTES, Stand, probe, report_for_ever
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import patient, wait_for

REPORTERS = 64
SCRAPE_RATIO = 10.0
ANSWER_RATIO = 8.0
PAUSE_SECONDS = 0.05
PROBES_PER_SECOND = 25.0
GZIP = {"Accept-Encoding": "gzip"}


def main() -> int:
    options = Options(__doc__)
    options.amount("--scrapes", 200, 20, "scrapes of each kind")
    options.amount("--seconds", 30.0, 5.0, "seconds of reports during scrapes")
    given = options.read()
    counts = (1,) if given.real_gpu else (1, 8)
    progress = Progress("scrape", 3 * len(counts))
    rows = [row for devices in counts for row in measure(given, progress, devices)]
    return show("scrape", rows, as_json=given.json)


def measure(given: argparse.Namespace, progress: Progress, devices: int) -> list[Row]:
    """One node."""
    progress.part(f"{REPORTERS} reporters on {devices} devices: start")
    with Place(real_gpu=given.real_gpu, devices=devices) as place:
        stand = place.stack.enter_context(Stand(REPORTERS + 1))
        if place.node is not None:
            for pid in stand.pids[:REPORTERS]:
                for device in range(devices):
                    place.node.set_process(pid, device, HELD_BYTES)
        exporter = place.exporter()
        uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
        place.start(report_for_ever, exporter.tcp_url, stand.pids[:REPORTERS], uuids, 1.0)
        wait_for(lambda: len(exporter.processes()) == REPORTERS, f"{REPORTERS} reporting processes")
        scraper = Http(exporter.tcp_url)
        page = scraper.timed("GET", "/metrics")[1]
        server = place.stack.enter_context(ConstantServer(place.folder, len(page)))
        series = sum(not line.startswith(b"#") for line in page.splitlines())
        name = f"{REPORTERS} × {len(uuids)}"
        progress.part(f"{name}: scrapes of {series} series")
        rows = _in_turns(
            given, progress, name, f"{series} series, {len(page) / 1e6:.2f} MB", scraper, Http(server.tcp_url)
        )
        progress.part(f"{name}: reports during scrapes")
        rows += _answers(given, progress, name, place, exporter, stand.pids[-1], uuids, scraper)
        rows.append(Row(f"{name}: exporter's RSS", resident_bytes(exporter.pid) / 1e6, "MB"))
        return rows


def _in_turns(
    given: argparse.Namespace, progress: Progress, name: str, size: str, scraper: Http, constant: Http
) -> list[Row]:
    plain, packed, least = [], [], []
    for _ in progress.turns(given.scrapes):
        plain.append(1e3 * scraper.timed("GET", "/metrics")[0])
        time.sleep(PAUSE_SECONDS)
        least.append(1e3 * constant.timed("GET", "/metrics")[0])
        time.sleep(PAUSE_SECONDS)
        packed.append(1e3 * scraper.timed("GET", "/metrics", headers=GZIP)[0])
        time.sleep(PAUSE_SECONDS)
    base = typical(least)
    beside = "a constant body"
    return [
        compared(f"{name}: scrape, {size}", typical(plain), "ms", beside, base, SCRAPE_RATIO),
        compared(f"{name}: scrape with gzip", typical(packed), "ms", beside, base),
        Row(f"{name}: scrape, p99", percentile(plain, 0.99), "ms", f"{beside}, p99 ({percentile(least, 0.99):.3g} ms)"),
    ]


def _answers(
    given: argparse.Namespace,
    progress: Progress,
    name: str,
    place: Place,
    exporter: ExporterProcess,
    pid: int,
    uuids: list[str],
    scraper: Http,
) -> list[Row]:
    """Replies to reports while one scrape per second is served, alternately plain and with gzip."""
    server = place.stack.enter_context(ConstantServer(place.folder, 64))
    receiver, sender = multiprocessing.Pipe(duplex=False)
    urls = exporter.tcp_url, server.tcp_url
    place.start(probe, urls, pid, uuids[:1], given.seconds, PROBES_PER_SECOND, sender)
    used = cpu_seconds(exporter.pid)
    started = time.monotonic()
    scrapes = 0
    while not receiver.poll():
        progress.sleep(1.0)
        scraper.timed("GET", "/metrics", headers=GZIP if scrapes % 2 else {})
        scrapes += 1
        if time.monotonic() - started > patient(given.seconds + 60):
            raise RuntimeError("the process that sends reports did not end")
    share = 100 * (cpu_seconds(exporter.pid) - used) / (time.monotonic() - started)
    answers, constant = ([1e3 * taken for taken in times] for times in receiver.recv())
    base = typical(constant)
    return [
        compared(f"{name}: the reply to a report", typical(answers), "ms", "a constant route", base, ANSWER_RATIO),
        Row(f"{name}: the reply to a report, p99", percentile(answers, 0.99), "ms"),
        Row(f"{name}: exporter's CPU, scraped once per second", share, "% of a core"),
    ]


if __name__ == "__main__":
    sys.exit(main())
