"""What the reporter costs the process that it observes: real torch, the real client, the real exporter.

    python -m benchmarks.reporter [--json] [--real-gpu]

A sample stands beside `torch.cuda.memory_stats()` and beside nothing, a program with the reporter beside the same
program without it, always in turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from benchmarks.claims import Row, parser, percentile, show
from benchmarks.place import Place, compiling_once, thread_seconds
from gpumem_exporter.cli.run import injected_environment
from tests.emulation.torch_process import REPOSITORY, TorchProcess
from tests.support.waiting import wait_for

SAMPLE_MICROSECONDS = 40.0
REPORTER_PERCENT = {1: 0.06, 8: 0.1}
PACED_SECONDS = 0.02
BUSY_SECONDS, REST_SECONDS = 0.9, 0.2


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--seconds", type=float, default=30.0, help="of each reporter at 1 Hz (default: %(default)s)")
    made.add_argument("--turns", type=int, default=20, help="with and without, each (default: %(default)s)")
    options = made.parse_args()
    rows = []
    for devices in (1,) if options.real_gpu else (1, 8):
        rows += samples(options, devices)
        rows += reporter_at_rest(options, devices)
    rows += hundred_hertz(options)
    with tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as bytecode:
        rows += injection(options, Path(bytecode))
        rows += start(options, Path(bytecode))
    return show("reporter", rows, as_json=options.json)


def samples(options: argparse.Namespace, devices: int) -> list[Row]:
    """One sample."""
    rows = []
    with Place(real_gpu=options.real_gpu, devices=devices) as place:
        process = _with_heaps(place, devices)
        for pause, how in ((0.0, "in a tight loop"), (PACED_SECONDS, "by itself, caches cold")):
            costs = process.exec(
                "from benchmarks import inside; result = inside.sample_costs(devices, rounds, pause)",
                devices=devices,
                rounds=200,
                pause=pause,
            )
            median = {name: statistics.median(values) / devices for name, values in costs.items()}
            what = f"CPU time of a sample, {_count(devices)}, {how}, a device"
            beside = f"memory_stats() ({median['memory_stats']:.1f} µs); nothing {median['nothing']:.2f} µs"
            limit = None if pause else SAMPLE_MICROSECONDS
            rows.append(Row(what, median["sample"], "µs", limit, beside, median["sample"] / median["memory_stats"]))
    return rows


def reporter_at_rest(options: argparse.Namespace, devices: int) -> list[Row]:
    """The reporter's thread at one report a second, in a program that waits and in one that computes."""
    rows = []
    with Place(real_gpu=options.real_gpu, devices=devices) as place:
        exporter = place.exporter()
        for transport, url in (("unix socket", exporter.url), ("TCP", exporter.tcp_url)):
            process = _with_heaps(place, devices, GPUMEM_EXPORTER_URL=url)
            share = _reporter_share(process, options.seconds)
            what = f"reporter at 1 Hz, {_count(devices)}, {transport}"
            rows.append(Row(what, share, "% of a core", REPORTER_PERCENT[devices]))
            process.close()
    return rows


def _reporter_share(process: TorchProcess, seconds: float) -> float:
    tid = _start_client(process)
    time.sleep(3.0)
    begun, used = time.monotonic(), thread_seconds(process.pid, tid)
    time.sleep(seconds)
    return 100 * (thread_seconds(process.pid, tid) - used) / (time.monotonic() - begun)


def hundred_hertz(options: argparse.Namespace) -> list[Row]:
    """A hundred reports a second beside a main thread that never lets go of the GIL: a hundred times what it costs."""
    speeds: dict[bool, list[float]] = {True: [], False: []}
    longest: dict[bool, list[float]] = {True: [], False: []}
    waited: list[float] = []
    shares: list[float] = []
    with Place(real_gpu=options.real_gpu, devices=1) as place:
        exporter = place.exporter("--report.interval", "0.01")
        process = _with_heaps(place, 1, GPUMEM_EXPORTER_URL=exporter.url)
        _start_client(process)  # what is imported by this is not what is measured
        process.call("stop_client")
        for turn in range(2 * options.turns):
            reporting = turn % 4 in (1, 2)  # neither is always the second
            time.sleep(REST_SECONDS)
            tid = _start_client(process) if reporting else 0
            before = thread_seconds(process.pid, tid) if reporting else 0.0
            seen = process.exec("from benchmarks import inside; result = inside.busy(seconds)", seconds=BUSY_SECONDS)
            if reporting:
                shares.append(100 * (thread_seconds(process.pid, tid) - before) / BUSY_SECONDS)
                process.call("stop_client")
                waited.append(max(seen["waited_ms"], default=0.0))
            speeds[reporting].append(seen["rounds_a_second"])
            longest[reporting].append(max(seen["waited_ms"] + seen["elsewhere_ms"], default=0.0))
    losses = sorted(100 * (1 - on / off) for on, off in zip(speeds[True], speeds[False], strict=True))
    quartiles = f"{percentile(losses, 0.25):.1f} to {percentile(losses, 0.75):.1f} %"
    gap, gap_without = statistics.median(longest[True]), statistics.median(longest[False])
    return [
        Row("main thread's loss at 100 Hz, median", statistics.median(losses), "%", 5.0, f"quartiles {quartiles}"),
        Row("longest gap in 0.9 s at 100 Hz, more than without", gap - gap_without, "ms", 2.0, f"{gap_without:.2f} ms"),
        Row("longest wait for the GIL in 0.9 s at 100 Hz, median", statistics.median(waited), "ms"),
        Row("reporter's thread at 100 Hz", statistics.median(shares), "% of a core"),
    ]


def injection(options: argparse.Namespace, bytecode: Path) -> list[Row]:
    """`gpumem-exporter run` in a Python process that never touches CUDA: `python -c pass` with and without it."""
    told = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GPUMEM_INJECT")}
    plain = compiling_once(told, bytecode)
    injected = injected_environment(plain, str(REPOSITORY / "gpumem_exporter" / "client" / "bootstrap"))
    wall: dict[str, list[float]] = {"with": [], "without": []}
    cpu: dict[str, list[float]] = {"with": [], "without": []}
    inside: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(10 * options.turns):
        for name, environment in (("without", plain), ("with", injected)):
            begun = time.perf_counter()
            pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], environment)
            usage = os.wait4(pid, 0)[2]
            wall[name].append(1e3 * (time.perf_counter() - begun))
            cpu[name].append(1e3 * (usage.ru_utime + usage.ru_stime))
            path = injected["PYTHONPATH"] if name == "with" else ""
            inside[name].append(float(_python(plain, "-c", _IMPORT_SITECUSTOMIZE, path)))
    rows = []
    for what, times, limit in (
        ("import of sitecustomize under `run`, CPU time more", inside, 1.0),
        ("`python -c pass` under `run`, CPU time more", cpu, None),
        ("`python -c pass` under `run`, wall time more", wall, None),
    ):
        more, without = _difference(times), statistics.median(times["without"])
        beside = f"{without:.2f} ms without" if limit is None else f"{without:.2f} ms to find none"
        rows.append(Row(what, more, "ms", limit, beside))
    return rows


_IMPORT_SITECUSTOMIZE = """
import sys, time
sys.modules.pop("sitecustomize", None)
sys.path[:0] = sys.argv[1:]
begun = time.thread_time()
try:
    import sitecustomize
except ModuleNotFoundError:
    pass
print(1e3 * (time.thread_time() - begun))
"""
"""Where an interpreter has started as usual, what it would have done before: with a clock."""


def start(options: argparse.Namespace, bytecode: Path) -> list[Row]:
    """Importing the client and `start()`, in a process that has imported nothing and in one that has imported torch."""
    rows = []
    for what, before, turns in (
        ("after torch", "torch", max(3, options.turns // 2)),
        ("in a bare interpreter", "sys", options.turns),
    ):
        environment = {**compiling_once(os.environ, bytecode), "PYTHONPATH": str(REPOSITORY)}
        seen = [_python(environment, "-c", _START, before) for _ in range(turns + 1)]
        times = [[float(number) for number in line.split()] for line in seen[1:]]  # the first writes the bytecode
        imported, started = (statistics.median(column) for column in zip(*times, strict=True))
        rows.append(Row(f"import gpumem_exporter.client, {what}", imported, "ms"))
        rows.append(Row(f"client.start(), {what}", started, "ms"))
    return rows


_START = """
import importlib, sys, time
importlib.import_module(sys.argv[1])
begun = time.perf_counter()
from gpumem_exporter import client
imported = time.perf_counter()
client.start()
print(1e3 * (imported - begun), 1e3 * (time.perf_counter() - imported))
"""


def _python(environment: Mapping[str, str], *arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=dict(environment), capture_output=True, text=True, check=True).stdout


def _difference(times: Mapping[str, list[float]]) -> float:
    return statistics.median(times["with"]) - statistics.median(times["without"])


def _with_heaps(place: Place, devices: int, **environment: str) -> TorchProcess:
    process = place.torch(**environment)
    for device in range(devices):
        process.call("random_heap", device=device, seed=device)
    return process


def _start_client(process: TorchProcess) -> int:
    process.call("start_client")
    code = "from benchmarks import inside; result = inside.reporter_thread()"
    tid: int = wait_for(lambda: process.exec(code), "the reporter's thread")
    return tid


def _count(devices: int) -> str:
    return f"{devices} device{'s' if devices > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
