"""Measures the cost of the reporter in its process, with real torch, the real client and the real exporter.

    python -m benchmarks.reporter [--quick] [--json] [--real-gpu]

The comparisons run in turns, or at the same time in one process:

- a sample with `torch.cuda.memory_stats()`,
- a report with a thread that only posts the same body by `http.client`,
- training and computing with the client and without it,
- the start of an interpreter below `gpumem-exporter run` with an ordinary start.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.claims import Options, Progress, Row, compared, percentile, show
from benchmarks.constant import ConstantServer
from benchmarks.place import Place, compiling_once, thread_seconds
from gpumem_client.run import injected_environment
from tests.emulation.torch_process import TorchProcess
from tests.support.paths import REPOSITORY
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.servers.recording_exporter import RecordingExporter
from tests.support.waiting import wait_for

SAMPLE_RATIO = 1.0
REPORT_RATIO = 5.0
ENGINE_RATIO = 5.0
TRAINING_RATIO = 1.5
BUSY_RATIO = 2.0
INJECTION_RATIO = 0.25
TURN_SECONDS, REST_SECONDS = 0.9, 0.2


def main() -> int:
    options = Options(__doc__)
    options.amount("--seconds", 30.0, 5.0, "seconds of reports at one device count")
    options.amount("--turns", 20, 3, "turns with the client and without it")
    options.amount("--interval", 1.0, 0.25, "seconds between two reports")
    given = options.read()
    counts = (1,) if given.real_gpu or given.quick else (1, 8)
    progress = Progress("reporter", 2 * len(counts) + 4)
    rows = []
    for devices in counts:
        with Place(real_gpu=given.real_gpu, devices=devices) as place:
            exporter = place.exporter("--report.interval", str(given.interval))
            process = _with_heaps(place, devices, GPUMEM_EXPORTER_URL=exporter.url)
            rows.append(samples(given, progress, process, devices))
            rows += reports(given, progress, place, exporter, process, devices)
    rows.append(engine(given, progress))
    rows += with_and_without(given, progress)
    with tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as bytecode:
        rows += injection(given, progress, Path(bytecode))
    return show("reporter", rows, as_json=given.json)


def samples(given: argparse.Namespace, progress: Progress, process: TorchProcess, devices: int) -> Row:
    """One sample of the allocator."""
    progress.part(f"samples of {_count(devices)}")
    costs = process.exec(
        "from benchmarks import inside; result = inside.sample_costs(devices, rounds)",
        devices=devices,
        rounds=10 * given.turns,
    )
    sample, stats = (statistics.median(costs[name]) / devices for name in ("sample", "memory_stats"))
    return compared(
        f"CPU of a sample, {_count(devices)}, per device", sample, "µs", "memory_stats()", stats, SAMPLE_RATIO
    )


def engine(given: argparse.Namespace, progress: Progress) -> Row:
    """One sample of an engine's process: its components, and a cache of 35,000 blocks in 80 tensors."""
    progress.part("an inference engine")
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        process = place.torch()
        sizes: dict[str, Any] = {"weights_bytes": 2 << 30, "cache_bytes": [16 << 20] * 80, "activations_bytes": 1 << 20}
        process.call_program("served_model", "serve", **sizes, blocks=[1, 0, -1, 0, 0] * 7000)
        costs = process.call_program("served_model", "costs", rounds=10 * given.turns)
    sample, stats = (statistics.median(costs[name]) for name in ("sample", "memory_stats"))
    return compared("CPU of a sample of an inference engine", sample, "µs", "memory_stats()", stats, ENGINE_RATIO)


def reports(
    given: argparse.Namespace,
    progress: Progress,
    place: Place,
    exporter: ExporterProcess,
    process: TorchProcess,
    devices: int,
) -> list[Row]:
    """Compare the reporter's thread with one that only posts the same body, in a process that waits."""
    progress.part(f"reports of {_count(devices)}")
    server = place.stack.enter_context(ConstantServer(place.folder, 64))
    body = _recorded_body(process, place.folder / "recording.sock")
    reporter = _start_client(process)
    plain = process.exec(
        "from benchmarks import inside; posts = inside.PlainPosts(path, body, interval)\n"
        "result = posts.thread.native_id",
        path=server.unix_url.removeprefix("unix://"),
        body=body,
        interval=given.interval,
    )
    progress.sleep(max(1.0, 3 * given.interval))  # the first reports import and allocate
    before = _usage(process, exporter, reporter, plain)
    progress.sleep(given.seconds)
    after = _usage(process, exporter, reporter, plain)
    process.exec("posts.stop()")
    spent, sent, posting, posted = (now - then for now, then in zip(after, before, strict=True))
    what = f"CPU of a report, {_count(devices)}, {len(body) / 1e3:.1f} kB"
    base = 1e6 * posting / posted
    return [
        compared(what, 1e6 * spent / sent, "µs", "http.client POST of the same body", base, REPORT_RATIO),
        Row(f"the same at one report per second, {_count(devices)}", 100 * spent / sent, "% of a core"),
    ]


def _recorded_body(process: TorchProcess, path: Path) -> str:
    """Return the body of a report of this process."""
    with RecordingExporter(path) as recorder:
        process.call("start_client", url=recorder.url)
        wait_for(lambda: len(recorder.reports) > 1, "two reports")
        process.call("stop_client")
        return json.dumps(recorder.reports[1], separators=(",", ":"))


def _usage(
    process: TorchProcess, exporter: ExporterProcess, reporter: int, plain: int
) -> tuple[float, float, float, float]:
    """Return the reporter's seconds and reports, and the posting thread's seconds and posts."""
    taken = exporter.metrics().value("gpumem_reports_total", outcome="accepted")
    posted = process.exec("result = posts.count")
    return thread_seconds(process.pid, reporter), taken, thread_seconds(process.pid, plain), posted


def with_and_without(given: argparse.Namespace, progress: Progress) -> list[Row]:
    """Training, and computing that never releases the GIL: with the client and without it, in turns."""
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        url = place.exporter("--report.interval", "1").url
        process = _with_heaps(place, 1, GPUMEM_EXPORTER_URL=url)
        process.exec("from benchmarks import inside; inside.training_cpu_seconds(1.0)")
        _start_client(process)  # the first start imports
        process.call("stop_client")
        progress.part("training with the client and without it")
        steps: dict[bool, list[float]] = {True: [], False: []}
        for reporting in _in_turns(given, progress, process, url):
            step = process.exec("result = inside.training_cpu_seconds(seconds)", seconds=TURN_SECONDS)
            steps[reporting].append(1e3 * step)
        url = place.exporter("--report.interval", "0.01").url
        progress.part("computing with 100 reports per second and without them")
        rounds: dict[bool, list[float]] = {True: [], False: []}
        waited: list[float] = []
        for reporting in _in_turns(given, progress, process, url):
            seen = process.exec("result = inside.busy(seconds)", seconds=TURN_SECONDS)
            rounds[reporting].append(1e6 * seen["round_cpu_seconds"])
            waited += [seen["waited_ms"]] * reporting
    return [
        _paired("CPU of a training step with the client", "ms", steps, TRAINING_RATIO),
        _paired("CPU of pure Python with 100 reports per second", "µs", rounds, BUSY_RATIO),
        Row("longest wait for the GIL in 0.9 s of that, median", statistics.median(waited), "ms"),
    ]


def _in_turns(given: argparse.Namespace, progress: Progress, process: TorchProcess, url: str) -> Iterator[bool]:
    """Yield whether the client runs in this turn."""
    for turn in progress.turns(2 * given.turns):
        reporting = turn % 4 in (1, 2)  # neither always comes second
        progress.sleep(REST_SECONDS)
        if reporting:
            process.call("start_client", url=url)
        yield reporting
        if reporting:
            process.call("stop_client")


def _paired(what: str, unit: str, times: Mapping[bool, list[float]], at_most: float) -> Row:
    """Return a row with the median ratio of turns with the client to the neighboring turns without it."""
    ratios = [on / off for on, off in zip(times[True], times[False], strict=True)]
    quartiles = f"quartiles {percentile(ratios, 0.25):.2f} to {percentile(ratios, 0.75):.2f}"
    beside = f"without ({statistics.median(times[False]):.3g} {unit}), {quartiles}"
    return Row(what, statistics.median(times[True]), unit, beside, statistics.median(ratios), at_most)


def injection(given: argparse.Namespace, progress: Progress, bytecode: Path) -> list[Row]:
    """`python -c pass` below `gpumem-exporter run` and without it."""
    progress.part("python -c pass below `run`")
    inherited = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "GPUMEM_INJECT")}
    plain = compiling_once(inherited, bytecode)
    injected = injected_environment(plain, str(REPOSITORY / "client" / "gpumem_client" / "bootstrap"))
    cpu: dict[str, list[float]] = {"with": [], "without": []}
    found: dict[str, list[float]] = {"with": [], "without": []}
    for _ in progress.turns(10 * given.turns):
        for name, environment in (("without", plain), ("with", injected)):
            pid = os.posix_spawn(sys.executable, [sys.executable, "-c", "pass"], environment)
            usage = os.wait4(pid, 0)[2]
            cpu[name].append(1e3 * (usage.ru_utime + usage.ru_stime))
            path = injected["PYTHONPATH"] if name == "with" else ""
            found[name].append(float(_python(plain, "-c", _IMPORT_SITECUSTOMIZE, path)))
    more, whole = _difference(found), statistics.median(cpu["without"])
    return [
        compared("CPU of importing sitecustomize below `run`", more, "ms", "python -c pass", whole, INJECTION_RATIO),
        compared("CPU of python -c pass below `run`", statistics.median(cpu["with"]), "ms", "without", whole),
    ]


_IMPORT_SITECUSTOMIZE = """
import sys, time
sys.modules.pop("sitecustomize", None)
sys.path[:0] = sys.argv[1:]
started = time.thread_time()
try:
    import sitecustomize
except ModuleNotFoundError:
    pass
print(1e3 * (time.thread_time() - started))
"""
"""Measures the import that each start of an interpreter does, in an interpreter that has started."""


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
    """Start the client and return the thread ID of its reporter."""
    process.call("start_client")
    code = "from benchmarks import inside; result = inside.reporter_thread()"
    tid: int = wait_for(lambda: process.exec(code), "the reporter's thread")
    return tid


def _count(devices: int) -> str:
    return f"{devices} device{'s' if devices > 1 else ''}"


if __name__ == "__main__":
    sys.exit(main())
