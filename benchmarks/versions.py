"""The speed of this checkout compared with another one, such as the last release. Both run at the same time.

    git worktree add ../released v0.3.0
    python -m benchmarks.versions ../released [--quick] [--json]

Each checkout's exporter serves the same 64 simulated reporters on 8 emulated devices, and each one's client reports
from its own process with torch. Scrapes, reports, actions and starts are measured in turns, CPU at the same time. Each
measurement is divided into five parts of equal length: the table has the median of their ratios, and the lowest and the
highest one.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.claims import Options, Progress, Row, compared, show, typical
from benchmarks.place import Http, Place, compiling_once, cpu_seconds, cpu_shares, resident_bytes, thread_seconds
from benchmarks.reporters import HELD_BYTES, Stand, report_bodies, report_for_ever
from benchmarks.round_trip import Requests
from gpumem_client.wire.protocol import REPORTS_PATH
from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.servers.exporter_process import UNLIMITED, ExporterProcess
from tests.support.waiting import wait_for

REPORTERS, DEVICES = 64, 8
RATIO = 1.1
ONE_SCRAPE_RATIO = 1.15
PARTS = 5
PAUSE_SECONDS = 0.05
OTHER = "the other checkout"


@dataclass(frozen=True, slots=True)
class Side:
    """One checkout: `tree` holds its packages, benchmarks and tests."""

    name: str
    tree: Path

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

    def torch(self, place: Place, url: str, devices: int) -> TorchProcess:
        """Start a process with torch on the first `devices` devices, without a client."""
        process = TorchProcess(place.node, {"GPUMEM_EXPORTER_URL": url}, launcher=self.launcher(place))
        place.stack.callback(process.close)
        for device in range(devices):
            process.call("random_heap", device=device, keep=0.2)
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
    progress = Progress("versions", 9)
    with Place(real_gpu=False, devices=DEVICES) as place:
        sides = [_side(place, name, of) for name, of in (("this", REPOSITORY), ("other", given.checkout.resolve()))]
        rows = at_rest(given, progress, place, sides)
        rows += starts(given, progress, place, sides)
        rows += imports(given, progress, place, sides)
        rows += first_reports(given, progress, place, sides)
        rows += reports(given, progress, place, sides)
        rows += scrapes(given, progress, place, sides)
    with Place(real_gpu=False, devices=DEVICES) as place:
        sides = [_side(place, name, of) for name, of in (("this", REPOSITORY), ("other", given.checkout.resolve()))]
        rows += actions_and_samples(given, progress, place, sides)
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
    """CPU of two exporters without requests."""
    progress.part("at rest")
    pids = [side.exporter(place, "rest").pid for side in sides]
    progress.sleep(3.0)
    rows = [_compared("exporter at rest: CPU", _shares(given, progress, pids), "% of a core")]
    resident = [[resident_bytes(pid) / 2**20] for pid in pids]
    return [*rows, _compared("exporter at rest: RSS", resident, "MiB")]


def starts(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """CPU and memory of an exporter from its start to its first poll of all devices."""
    progress.part("starts")
    resident: dict[Side, list[float]] = {side: [] for side in sides}

    def started(side: Side, turn: int) -> float:
        exporter = side.exporter(place, f"start{turn}")
        used = cpu_seconds(exporter.pid)
        resident[side].append(resident_bytes(exporter.pid) / 2**20)
        exporter.close()
        return used

    return [
        _compared("exporter: CPU from start to first poll", _in_turns(progress, sides, given.starts, started), "s"),
        _compared("exporter after its start: RSS", list(resident.values()), "MiB"),
    ]


def imports(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """CPU of the import of the client in a fresh interpreter."""
    progress.part("imports")
    environment = compiling_once(place.environment(), place.folder)

    def imported(side: Side, _: int) -> float:
        code = "import time; s = time.thread_time(); import gpumem_client; print(1e3 * (time.thread_time() - s))"
        command = [*side.launcher(place), sys.executable, "-c", code]
        return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)

    times = _in_turns(progress, sides, 4 * given.starts, imported)
    return [_compared("client: CPU of the import", times, "ms")]


def first_reports(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """CPU of a process with torch, from the import of the client to the first report, on one device."""
    progress.part("first reports")
    exporters = {side: side.exporter(place, "first") for side in sides}

    def first(side: Side, _: int) -> float:
        process = side.torch(place, exporters[side].url, 1)
        code = "import time; s = time.thread_time(); import gpumem_client; gpumem_client.start()\n"
        main = process.exec(f"{code}result = time.thread_time() - s")
        thread = process.exec("from benchmarks import inside; result = inside.reporter_thread()")
        exporters[side].wait_for_processes(process.pid)
        spent = main + thread_seconds(process.pid, thread)
        process.close()
        return 1e3 * float(spent)

    times = _in_turns(progress, sides, given.starts, first)
    return [_compared("client: CPU of the import, the start and the first report", times, "ms")]


def reports(given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]) -> list[Row]:
    """Reports that wait for nothing, of one process on one device and of another one on all devices."""
    exporters = [side.exporter(place, "reported") for side in sides]
    uuids = [device["uuid"] for device in exporters[0].get("/api/v1/devices")["devices"]]
    rows = []
    for devices in (1, DEVICES):
        progress.part(f"reports of devices: {devices}")
        (pid,) = place.stack.enter_context(Stand(1)).pids
        requests = {
            side: Requests(exporter.pid, Http(exporter.url), REPORTS_PATH, report_bodies(pid, uuids[:devices]))
            for side, exporter in zip(sides, exporters, strict=True)
        }
        for turn in progress.turns(given.scrapes + 1):
            for side in sides if turn % 2 else sides[::-1]:
                requests[side].batch(warm=turn > 0)
        what = f"exporter: a report of {'one device' if devices == 1 else f'{devices} devices'}"
        rows.append(_compared(what, [requests[side].wall for side in sides], "µs"))
        rows.append(_compared(f"{what}, CPU", [requests[side].cpu for side in sides], "µs"))
    return rows


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

    rows = [_compared("scrape", _in_turns(progress, sides, given.scrapes, scraped), "ms")]
    rows.append(_scrape_of_one(given, progress, place, sides, uuids[:1]))
    pids = [exporter.pid for exporter in exporters]
    spent = [[10 * share for share in shares] for shares in _shares(given, progress, pids)]
    rows.append(_compared(f"exporter: CPU of {REPORTERS} reports", spent, "ms"))

    def reported_and_scraped(side: Side, _: int) -> float:
        pid = pids[sides.index(side)]
        used, started = cpu_seconds(pid), time.monotonic()
        clients[side].timed("GET", "/metrics")
        time.sleep(max(0.0, started + 1.0 - time.monotonic()))
        return 1e3 * (cpu_seconds(pid) - used)

    both = _in_turns(progress, sides, round(given.seconds / 2), reported_and_scraped)
    rows.append(_compared(f"exporter: CPU of {REPORTERS} reports and a scrape", both, "ms"))
    resident = [[resident_bytes(pid) / 2**20] for pid in pids]
    return [*rows, _compared(f"exporter with {REPORTERS} reporters: RSS", resident, "MiB")]


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


def actions_and_samples(
    given: argparse.Namespace, progress: Progress, place: Place, sides: Sequence[Side]
) -> list[Row]:
    """Round trips of actions, and the CPU of the reporter's thread."""
    progress.part("actions and samples")
    exporters = [side.exporter(place, "commanded") for side in sides]
    pairs = list(zip(sides, exporters, strict=True))
    processes = {
        devices: [side.torch(place, exporter.url, devices) for side, exporter in pairs] for devices in (1, DEVICES)
    }
    for devices in processes:
        for exporter, process in zip(exporters, processes[devices], strict=True):
            process.call("start_client")
            exporter.wait_for_processes(process.pid)
    clients = [Http(exporter.url) for exporter in exporters]
    targets = dict(zip(sides, zip(clients, processes[DEVICES], strict=True), strict=True))

    def acted(side: Side, _: int) -> float:
        client, process = targets[side]
        process.exec("scratch = [torch.empty(30 << 20, dtype=torch.uint8, device='cuda') for _ in range(4)]")
        process.exec("del scratch")
        time.sleep(random.uniform(0.03, 0.09))
        body = {"action": "empty_cache", "target": {"pid": process.pid}, "wait_seconds": 10}
        took, answer = client.timed("POST", "/api/v1/actions", json.dumps(body).encode())
        results = json.loads(answer)["results"]
        if not any(result["freed_bytes"] for result in results):
            raise RuntimeError(f"an action freed nothing: {answer!r}")
        return 1e3 * (took - max(result["duration_seconds"] for result in results))

    rows = [_compared("round trip of an action", _in_turns(progress, sides, given.actions, acted), "ms")]
    code = "from benchmarks import inside; result = inside.reporter_thread()"
    threads = {devices: [(process.pid, process.exec(code)) for process in processes[devices]] for devices in processes}
    spent: dict[int, list[list[float]]] = {devices: [[], []] for devices in processes}
    for _ in range(PARTS):
        before = {devices: [thread_seconds(*thread) for thread in threads[devices]] for devices in processes}
        progress.sleep(given.seconds / PARTS)
        for devices in processes:
            for side, thread in enumerate(threads[devices]):
                spent[devices][side].append(
                    1e6 * (thread_seconds(*thread) - before[devices][side]) / given.seconds * PARTS
                )
    rows.append(_compared("reporter of one device: CPU in a second", spent[1], "µs"))
    rows.append(_compared(f"reporter of {DEVICES} devices: CPU in a second", spent[DEVICES], "µs"))
    return rows


def _shares(given: argparse.Namespace, progress: Progress, pids: Sequence[int]) -> list[list[float]]:
    """Return the percent of a core that each process uses, part by part."""
    parts = [cpu_shares(progress, pids, given.seconds / PARTS) for _ in range(PARTS)]
    return [list(shares) for shares in zip(*parts, strict=True)]


def _in_turns(
    progress: Progress, sides: Sequence[Side], turns: int, measure: Callable[[Side, int], float]
) -> list[list[float]]:
    """Return the values of each side, without the first turn, which writes bytecode. Their order alternates."""
    times: dict[Side, list[float]] = {side: [] for side in sides}
    for turn in progress.turns(turns + 1):
        for side in sides if turn % 2 else sides[::-1]:
            taken = measure(side, turn)
            if turn:
                times[side].append(taken)
    return list(times.values())


def _compared(what: str, measured: Sequence[Sequence[float]], unit: str, at_most: float = RATIO) -> Row:
    """Return the row of two sides whose values were measured in turns or at the same time."""
    this, other = measured
    parts = min(PARTS, len(this))
    of_parts = [
        [typical(values[len(values) * n // parts : len(values) * (n + 1) // parts]) for n in range(parts)]
        for values in measured
    ]
    ratios = sorted(one / beside for one, beside in zip(*of_parts, strict=True))
    row = compared(what, typical(this), unit, OTHER, typical(other), at_most)
    return dataclasses.replace(row, ratio=statistics.median(ratios), spread=(ratios[0], ratios[-1]))


if __name__ == "__main__":
    sys.exit(main())
