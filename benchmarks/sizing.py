"""What one node costs, by its number of processes: series and bytes of a page, memory and CPU of the exporter.

    python -m benchmarks.sizing [--quick] [--json]

Simulated reporters send full reports (12 phases, 4 components) once a second to a real exporter, on an emulated node
with 8 devices. A scrape every 15 s is part of the CPU time. Each process is on one device, as the ranks of a job are;
the last rows have processes on all 8.
"""

from __future__ import annotations

import re
import sys
import time
import zlib
from collections.abc import Sequence

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.place import Http, Place, cpu_seconds, resident_bytes
from benchmarks.reporters import HELD_BYTES, Stand, report_for_ever
from tests.support.waiting import wait_for

DEVICES = 8
SCRAPE_SECONDS = 15.0


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--scrapes", 4, 1, "scrapes of each exporter, 15 s apart")
    given = options.read()
    cases = [(8, 1), (64, 1)] if given.quick else [(0, 1), (8, 1), (16, 1), (64, 1), (256, 1), (512, 1), (64, DEVICES)]
    progress = Progress("sizing", len(cases))
    rows = [row for processes, each in cases for row in measured(processes, each, given.scrapes, progress)]
    return show("sizing", rows, as_json=given.json)


def measured(processes: int, devices_of_each: int, scrapes: int, progress: Progress) -> list[Row]:
    """Return the costs of an exporter with this number of processes."""
    what = f"{processes} processes on {devices_of_each} of {DEVICES} devices each"
    progress.part(what)
    with Place(real_gpu=False, devices=DEVICES) as place:
        assert place.node is not None
        stand = place.stack.enter_context(Stand(processes))
        exporter = place.exporter("--report.max-processes", "1024")
        empty_bytes = resident_bytes(exporter.pid)
        uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
        for chosen, pids in _shares(uuids, stand.pids, devices_of_each):
            for pid in pids:
                for uuid in chosen:
                    place.node.set_process(pid, uuids.index(uuid), HELD_BYTES // 16)
            if pids:
                place.start(report_for_ever, exporter.tcp_url, pids, chosen, 1.0)
        wait_for(lambda: len(exporter.processes()) == processes, f"{processes} reporting processes")
        client = Http(exporter.tcp_url)
        client.timed("GET", "/metrics")
        progress.sleep(5.0)
        used, started = cpu_seconds(exporter.pid), time.monotonic()
        for _ in range(scrapes):
            _, page = client.timed("GET", "/metrics")
            progress.sleep(SCRAPE_SECONDS)
        share = 100 * (cpu_seconds(exporter.pid) - used) / (time.monotonic() - started)
        series = len(re.findall(rb"^[^#\n]", page, re.MULTILINE))
        packed = len(zlib.compress(page, 1))
        return [
            Row(f"{what}: series", series, ""),
            Row(f"{what}: page", len(page) / 2**10, "KiB", beside=f"{packed / 2**10:.0f} KiB compressed"),
            Row(
                f"{what}: RSS",
                resident_bytes(exporter.pid) / 2**20,
                "MiB",
                beside=f"{empty_bytes / 2**20:.0f} at start",
            ),
            Row(f"{what}: peak RSS", exporter.peak_bytes() / 2**20, "MiB"),
            Row(f"{what}: CPU", share, "% of a core"),
        ]


def _shares(uuids: Sequence[str], pids: Sequence[int], each: int) -> list[tuple[Sequence[str], Sequence[int]]]:
    """Return the devices of each group of processes."""
    if each == len(uuids):
        return [(uuids, pids)]
    return [((uuid,), pids[place :: len(uuids)]) for place, uuid in enumerate(uuids)]


if __name__ == "__main__":
    sys.exit(main())
