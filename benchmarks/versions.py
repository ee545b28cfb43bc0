"""The speed of this checkout compared with another one, such as the last release. Both run at the same time.

    git worktree add ../released v0.1.0
    python -m benchmarks.versions ../released [--quick] [--json]

Each checkout's exporter serves the same 64 simulated reporters on 8 emulated devices, and each one's client reports
from its own process with torch. Scrapes, actions and starts are measured in turns, CPU and memory at the same time.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims import Options, Progress, Row, compared, show, typical
from benchmarks.place import Http, Place, compiling_once, cpu_seconds, cpu_shares, resident_bytes, thread_seconds
from benchmarks.reporters import HELD_BYTES, Stand, report_for_ever
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import UNLIMITED, ExporterProcess
from tests.support.paths import REPOSITORY
from tests.support.waiting import wait_for

REPORTERS, DEVICES = 64, 8
RATIO = 1.05
SCRAPE_RATIO = 2
"""Releases before 0.3 rendered the lines of a process in each of its reports, and a scrape only joined them. Now a
scrape renders what has changed since the last one, which takes less CPU in all: the row with reports and a scrape."""
ONE_SCRAPE_RATIO = 1.15
REPORT_RATIO = 1.25
"""A sample of 0.3 has more values; a run of ten seconds has few readings of the idle cache, whose number is random."""
PAUSE_SECONDS = 0.05
OTHER = "the other checkout"


@dataclass(frozen=True, slots=True)
class Side:
    """One checkout: `tree` holds its packages, benchmarks and tests."""

    name: str
    tree: Path

    @property
    def client(self) -> str:
        """The import name of this side's client, which was a part of the exporter's package in 0.2."""
        return "gpumem_client" if (self.tree / "gpumem_client").exists() else "gpumem_exporter.client"

    def launcher(self, place: Place) -> tuple[str, ...]:
        """Return the command prefix that makes Python import this side's package."""
        bytecode = place.folder / f"bytecode-{self.name}"
        return "env", "-C", str(self.tree), f"PYTHONPATH={self.tree}", f"PYTHONPYCACHEPREFIX={bytecode}"

    def exporter(self, place: Place, name: str, *flags: str) -> ExporterProcess:
        """Start this side's exporter."""
        folder = place.folder / f"{name}-{self.name}"
        folder.mkdir()
        environment = compiling_once(place.environment(), place.folder)
        exporter = ExporterProcess(folder, *UNLIMITED, *flags, environment=environment, launcher=self.launcher(place))
        place.stack.callback(exporter.close)
        return exporter

    def torch(self, place: Place, url: str) -> TorchProcess:
        """Start a process with torch and this side's client."""
        process = TorchProcess(place.node, {"GPUMEM_EXPORTER_URL": url}, launcher=self.launcher(place))
        place.stack.callback(process.close)
        for device in range(DEVICES):
            process.call("random_heap", device=device, keep=0.2)
        process.call("start_client")
        return process


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.parser.add_argument("checkout", type=Path, help="the other checkout")
    options.amount("--scrapes", 200, 40, "scrapes of each exporter")
    options.amount("--actions", 100, 20, "actions at each client")
    options.amount("--seconds", 60.0, 10.0, "seconds of reports, and at rest")
    options.amount("--starts", 15, 3, "starts of each exporter, and imports of each client")
    given = options.read()
    if not (given.checkout / "gpumem_exporter").is_dir():
        options.parser.error(f"{given.checkout} has no folder gpumem_exporter")
    progress = Progress("versions", 6)
    with Place(real_gpu=False, devices=DEVICES) as place:
        sides = [_side(place, name, of) for name, of in (("this", REPOSITORY), ("other", given.checkout.resolve()))]
        rows = at_rest(given, progress, place, sides)
        rows += starts(given, progress, place, sides)
        rows += imports(given, progress, place, sides)
        rows += scrapes(given, progress, place, sides)
    with Place(real_gpu=False, devices=DEVICES) as place:
        sides = [_side(place, name, of) for name, of in (("this", REPOSITORY), ("other", given.checkout.resolve()))]
        rows += actions_and_reports(given, progress, place, sides)
    return show("versions", rows, as_json=given.json)


def _side(place: Place, name: str, checkout: Path) -> Side:
    tree = place.folder / f"tree-{name}"
    tree.mkdir()
    # Benchmarks and tests of the same checkout: they import its client.
    for folder in ("gpumem_exporter", "benchmarks", "tests", "client/gpumem_client", "toolkit/gpumem_toolkit"):
        if (checkout / folder).exists():
            (tree / Path(folder).name).symlink_to(checkout / folder)
    return Side(name, tree)


def at_rest(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """Memory and CPU of two exporters without requests."""
    progress.part("at rest")
    pids = [side.exporter(place, "rest").pid for side in sides]
    progress.sleep(3.0)
    share = cpu_shares(progress, pids, given.seconds)
    return [
        _compared("exporter at rest: RSS", [resident_bytes(pid) / 2**20 for pid in pids], "MiB"),
        _compared("exporter at rest: CPU", share, "% of a core"),
    ]


def starts(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """CPU from the start of an exporter to its first poll of all devices."""
    progress.part("starts")

    def started(side: Side, turn: int) -> float:
        exporter = side.exporter(place, f"start{turn}")
        used = cpu_seconds(exporter.pid)
        exporter.close()
        return used

    return [_compared("exporter: CPU from start to first poll", _in_turns(progress, sides, given.starts, started), "s")]


def imports(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """CPU of the import of the client in a fresh interpreter."""
    progress.part("imports")
    environment = compiling_once(place.environment(), place.folder)

    def imported(side: Side, _: int) -> float:
        code = f"import time; s = time.thread_time(); import {side.client}; print(1e3 * (time.thread_time() - s))"
        command = [*side.launcher(place), sys.executable, "-c", code]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    times = _in_turns(progress, sides, 4 * given.starts, imported)
    return [_compared("client: CPU of the import", times, "ms")]


def scrapes(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """Scrapes of two exporters with the same reporters."""
    progress.part(f"{REPORTERS} reporters on {DEVICES} devices: start")
    assert place.node is not None
    stand = place.stack.enter_context(Stand(REPORTERS))
    for pid in stand.pids:
        for device in range(DEVICES):
            place.node.set_process(pid, device, HELD_BYTES)
    exporters = [side.exporter(place, "scraped") for side in sides]
    uuids = [device["uuid"] for device in exporters[0].get("/api/v1/devices")["devices"]]
    for exporter in exporters:
        place.start(report_for_ever, exporter.tcp_url, stand.pids, uuids, 1.0)
    for exporter in exporters:
        wait_for(lambda of=exporter: len(of.processes()) == REPORTERS, f"{REPORTERS} reporting processes")
    clients = dict(zip(sides, (Http(exporter.tcp_url) for exporter in exporters), strict=True))
    progress.part("scrapes")

    def scraped(side: Side, _: int) -> float:
        time.sleep(PAUSE_SECONDS)
        return 1e3 * clients[side].timed("GET", "/metrics")[0]

    rows = [_compared("scrape", _in_turns(progress, sides, given.scrapes, scraped), "ms", SCRAPE_RATIO)]
    rows.append(_scrape_of_one(given, progress, place, sides, uuids[:1]))
    pids = [exporter.pid for exporter in exporters]
    shares = cpu_shares(progress, pids, given.seconds)
    rows.append(_compared(f"exporter: CPU of {REPORTERS} reports", [10 * share for share in shares], "ms"))

    def reported_and_scraped(side: Side, _: int) -> float:
        pid = pids[sides.index(side)]
        used, started = cpu_seconds(pid), time.monotonic()
        clients[side].timed("GET", "/metrics")
        time.sleep(max(0.0, started + 1.0 - time.monotonic()))
        return 1e3 * (cpu_seconds(pid) - used)

    both = _in_turns(progress, sides, round(given.seconds / 2), reported_and_scraped)
    rows.append(_compared(f"exporter: CPU of {REPORTERS} reports and a scrape", both, "ms"))
    rows.append(
        _compared("exporter with them: RSS", [resident_bytes(exporter.pid) / 2**20 for exporter in exporters], "MiB")
    )
    return rows


def _scrape_of_one(
    given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side], uuids: Sequence[str]
) -> Row:
    """Scrapes of two exporters with one process each, which reports between the scrapes."""
    progress.part("scrapes of one process")
    stand = place.stack.enter_context(Stand(1))
    exporters = [side.exporter(place, "of-one") for side in sides]
    for exporter in exporters:
        place.start(report_for_ever, exporter.tcp_url, stand.pids, uuids, PAUSE_SECONDS)
    for exporter in exporters:
        wait_for(lambda of=exporter: len(of.processes()) == 1, "the reporting process")
    clients = dict(zip(sides, (Http(exporter.tcp_url) for exporter in exporters), strict=True))

    def scraped(side: Side, _: int) -> float:
        time.sleep(PAUSE_SECONDS)
        return 1e3 * clients[side].timed("GET", "/metrics")[0]

    times = _in_turns(progress, sides, 2 * given.scrapes, scraped)
    return _compared("scrape of one process", times, "ms", ONE_SCRAPE_RATIO)


def actions_and_reports(
    given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]
) -> list[Row]:
    """Round trips of actions, and the CPU of the reporter's thread."""
    progress.part("actions and reports")
    exporters = [side.exporter(place, "commanded") for side in sides]
    processes = [side.torch(place, exporter.url) for side, exporter in zip(sides, exporters, strict=True)]
    for exporter, process in zip(exporters, processes, strict=True):
        exporter.wait_for_processes(process.pid)
    targets = dict(zip(sides, zip((Http(one.url) for one in exporters), processes, strict=True), strict=True))

    def acted(side: Side, _: int) -> float:
        client, process = targets[side]
        process.exec("scratch = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]")
        process.exec("del scratch")
        time.sleep(random.uniform(0.03, 0.09))
        body = {"action": "empty_cache", "target": {"pid": process.pid}, "wait_seconds": 10}
        took, answer = client.timed("POST", "/api/v1/actions", json.dumps(body).encode())
        results = json.loads(answer)["results"]  # 0.1 has one for each device
        if not any(result["freed_bytes"] for result in results):
            raise RuntimeError(f"an action freed nothing: {answer!r}")
        return 1e3 * (took - max(result["duration_seconds"] for result in results))

    rows = [_compared("round trip of an action", _in_turns(progress, sides, given.actions, acted), "ms")]
    code = "from benchmarks import inside; result = inside.reporter_thread()"
    threads = [(process.pid, process.exec(code)) for process in processes]

    def usage() -> list[tuple[float, float]]:
        return [
            (thread_seconds(*thread), exporter.metrics().value("gpumem_reports_total", outcome="accepted"))
            for thread, exporter in zip(threads, exporters, strict=True)
        ]

    before = usage()
    progress.sleep(given.seconds)
    costs = [
        1e6 * (spent - was) / (reports - were) for (spent, reports), (was, were) in zip(usage(), before, strict=True)
    ]
    rows.append(_compared(f"reporter: CPU of a report of {DEVICES} devices", costs, "µs", REPORT_RATIO))
    return rows


def _in_turns(
    progress: Progress, sides: Sequence[Side], turns: int, measure: Callable[[Side, int], float]
) -> list[float]:
    """Return the typical value of each side, without the first turn, which writes bytecode. Their order alternates."""
    times: Mapping[Side, list[float]] = {side: [] for side in sides}
    for turn in progress.turns(turns + 1):
        for side in sides if turn % 2 else sides[::-1]:
            taken = measure(side, turn)
            if turn:
                times[side].append(taken)
    return [typical(times[side]) for side in sides]


def _compared(what: str, measured: Sequence[float], unit: str, at_most: float = RATIO) -> Row:
    this, other = measured
    return compared(what, this, unit, OTHER, other, at_most)


if __name__ == "__main__":
    sys.exit(main())
