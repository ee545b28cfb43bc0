"""What the exporter takes on a node where nothing happens: start, memory, CPU.

    python -m benchmarks.footprint [--json] [--real-gpu]

The start stands beside a bare import of what the exporter is built on, in turns with it; CPU at rest beside a server of
the same kind that has nothing to do. The bytecode is there already,
as it is in an image or after the first start.
"""

from __future__ import annotations

import argparse
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import Pipe, get_context
from pathlib import Path

from benchmarks.claims import Row, parser, show
from benchmarks.constant import serve_constant
from benchmarks.place import Place, compiling_once, cpu_seconds, resident_bytes
from gpumem_exporter.client._transport import Connection
from gpumem_exporter.errors import ExporterUnreachableError

START_SECONDS = 0.7
RESIDENT_MIB = 56.0
"""As memory limits are given, and as `docker stats` and `systemctl status` count."""
CPU_PERCENT = 0.4
SETTLE_SECONDS = 5.0
REPOSITORY = Path(__file__).parents[1]
DEPENDENCIES = "import fastapi, httptools, prometheus_client, pydantic, pynvml, uvicorn, uvloop"


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--starts", type=int, default=15, help="of each kind (default: %(default)s)")
    made.add_argument("--seconds", type=float, default=60.0, help="at rest (default: %(default)s)")
    made.add_argument("--imports", action="store_true", help="print what importing costs, too")
    options = made.parse_args()
    with Place(real_gpu=options.real_gpu, devices=8) as place:
        rows = [*starts(options, place), *at_rest(options, place)]
        rows += demo(options, place)
        if options.imports:
            print_imports(place)
    return show("footprint", rows, as_json=options.json)


def starts(options: argparse.Namespace, place: Place) -> list[Row]:
    """From the start of the process to its first answer, and to its first poll."""
    answered, ready, demo_answered, bare = [], [], [], []
    environment = _environment(place)
    for turn in range(options.starts + 1):
        with _serving(place, environment) as (process, begun, client):
            first = _wait_for_answer(client, "/metrics", process) - begun
            polled = _wait_for_answer(client, "/-/ready", process) - begun
        with _serving(place, environment, "--demo") as (process, begun, client):
            first_of_demo = _wait_for_answer(client, "/metrics", process) - begun
        begun = time.perf_counter()
        subprocess.run([sys.executable, "-c", DEPENDENCIES], env=environment, check=True)
        imported = time.perf_counter() - begun
        if turn:  # the first writes the bytecode
            answered.append(first)
            ready.append(polled)
            demo_answered.append(first_of_demo)
            bare.append(imported)
    median, floor = statistics.median(answered), statistics.median(bare)
    beside = f"importing its dependencies ({floor:.2f} s)"
    return [
        Row("start to first answer, median", median, "s", START_SECONDS, beside, median / floor),
        Row("start to first answer, fastest", min(answered), "s", None, f"dependencies {min(bare):.2f} s"),
        Row("start to first poll of 8 devices, median", statistics.median(ready), "s"),
        Row("start to first answer of the demo, median", statistics.median(demo_answered), "s"),
    ]


def at_rest(options: argparse.Namespace, place: Place) -> list[Row]:
    """Memory and CPU of an exporter that polls its devices and is asked nothing."""
    receiver, sender = Pipe(duplex=False)
    idle = get_context("spawn").Process(target=serve_constant, args=(1024, sender), daemon=True)
    idle.start()
    receiver.recv()
    with _serving(place, _environment(place)) as (process, _, client):
        _wait_for_answer(client, "/-/ready", process)
        share, idle_share = _shares([process.pid, idle.pid or 0], options.seconds)
        rows = [
            Row("RSS at rest", resident_bytes(process.pid) / 2**20, "MiB", RESIDENT_MIB),
            Row("CPU at rest", share, "% of a core", CPU_PERCENT, f"an idle uvicorn ({idle_share:.2f} %)"),
        ]
    idle.terminate()
    idle.join()
    return rows


def demo(options: argparse.Namespace, place: Place) -> list[Row]:
    """The demo, which simulates its node and its processes in the same process."""
    with _serving(place, _environment(place), "--demo") as (process, _, client):
        _wait_for_answer(client, "/-/ready", process)
        (share,) = _shares([process.pid], options.seconds)
        return [
            Row("RSS of the demo", resident_bytes(process.pid) / 2**20, "MiB"),
            Row("CPU of the demo", share, "% of a core"),
        ]


def print_imports(place: Place) -> None:
    """Where the time of importing goes: the dearest packages, each with what it alone brings."""
    code = "import gpumem_exporter.cli.serve, gpumem_exporter.server.serving, gpumem_exporter.nvml.pynvml_provider"
    command = [sys.executable, "-X", "importtime", "-c", code]
    environment = _environment(place)
    for _ in range(2):
        seen = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stderr
    own: dict[str, int] = {}
    for microseconds, module in re.findall(r"import time:\s+(\d+) \|\s+\d+ \|\s+(\S+)", seen):
        package = ".".join(module.split(".")[:2]) if module.startswith(("fastapi", "gpumem")) else module.split(".")[0]
        own[package] = own.get(package, 0) + int(microseconds)
    print(f"imports: {sum(own.values()) / 1e3:.0f} ms with the tracing that shows it")
    for package, microseconds in sorted(own.items(), key=lambda item: -item[1])[:20]:
        print(f"  {package:40}{microseconds / 1e3:8.1f} ms")


def _shares(pids: Sequence[int], seconds: float) -> list[float]:
    """Per cent of a core that each process takes."""
    time.sleep(SETTLE_SECONDS)
    begun, used = time.monotonic(), [cpu_seconds(pid) for pid in pids]
    time.sleep(seconds)
    taken = time.monotonic() - begun
    return [100 * (cpu_seconds(pid) - before) / taken for pid, before in zip(pids, used, strict=True)]


def _environment(place: Place) -> dict[str, str]:
    return {**compiling_once(place.environment(), place.folder / "bytecode"), "PYTHONPATH": str(REPOSITORY)}


@contextmanager
def _serving(
    place: Place, environment: Mapping[str, str], *flags: str
) -> Iterator[tuple[subprocess.Popen[bytes], float, Connection]]:
    """The exporter from the moment at which its process is started."""
    path = place.folder / "footprint.sock"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpumem_exporter", "serve", *flags]
    command += ["--web.listen-address", "127.0.0.1:0", "--web.listen-socket", str(path)]
    begun = time.perf_counter()
    process = subprocess.Popen(command, env=dict(environment), stderr=subprocess.DEVNULL, cwd=REPOSITORY)
    client = Connection(f"unix://{path}", timeout_seconds=30)
    try:
        yield process, begun, client
    finally:
        client.close()
        process.terminate()
        process.wait(30)


def _wait_for_answer(client: Connection, path: str, process: subprocess.Popen[bytes]) -> float:
    """The moment of the first 200."""
    while process.poll() is None:
        try:
            if client.request("GET", path).status == 200:
                return time.perf_counter()
        except ExporterUnreachableError:
            pass
        time.sleep(0.002)
    raise RuntimeError(f"the exporter ended with {process.returncode}")


if __name__ == "__main__":
    sys.exit(main())
