"""Time to start, memory and CPU of the exporter on an idle node.

    python -m benchmarks.footprint [--quick] [--json] [--real-gpu]

The start is compared, in turns, with a bare import of the exporter's dependencies, its memory with a Python that has
imported FastAPI and uvicorn, and its CPU at rest with an idle server of the same kind. The bytecode exists already, as
in an image or after the first start.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.claims import Options, Progress, Row, compared, show, typical
from benchmarks.constant import ConstantServer
from benchmarks.place import Http, Place, compiling_once, cpu_shares, resident_bytes
from tests.support.paths import REPOSITORY
from tests.support.waiting import eventually, patient

START_RATIO = 2.5
RESIDENT_RATIO = 2.0
CPU_RATIO = 10.0
SETTLE_SECONDS = 3.0
DEPENDENCIES = "import fastapi, httptools, pydantic, pynvml, uvicorn, uvloop"
BARE = "import fastapi, uvicorn; print(flush=True); input()"


def main() -> int:
    options = Options(__doc__)
    options.amount("--starts", 15, 3, "starts of each kind")
    options.amount("--seconds", 60.0, 10.0, "seconds at rest")
    given = options.read()
    progress = Progress("footprint", 2)
    with Place(real_gpu=given.real_gpu, devices=8) as place:
        rows = [*starts(given, progress, place), *at_rest(given, progress, place)]
    return show("footprint", rows, as_json=given.json)


def starts(given: argparse.Namespace, progress: Progress, place: Place) -> list[Row]:
    """From the start of the process to its first reply, and to its first poll."""
    progress.part("starts")
    answered, ready, bare = [], [], []
    environment = _environment(place)
    for turn in progress.turns(given.starts + 1):
        started = time.perf_counter()
        with _serving(place, environment) as (process, url):
            first = _first_answer(url, "/metrics", process) - started
            polled = _first_answer(url, "/-/ready", process) - started
        started = time.perf_counter()
        subprocess.run([sys.executable, "-c", DEPENDENCIES], env=environment, check=True)
        imported = time.perf_counter() - started
        if turn:  # the first writes the bytecode
            answered.append(first)
            ready.append(polled)
            bare.append(imported)
    beside, base = "importing its dependencies", typical(bare)
    return [
        compared("start to first reply", typical(answered), "s", beside, base, START_RATIO),
        compared("start to first poll of 8 devices", typical(ready), "s", beside, base),
    ]


def at_rest(given: argparse.Namespace, progress: Progress, place: Place) -> list[Row]:
    """Memory and CPU of an exporter that polls its devices and gets no request."""
    progress.part("at rest")
    environment = _environment(place)
    server = place.stack.enter_context(ConstantServer(place.folder, 1024))
    bare = subprocess.Popen(
        [sys.executable, "-c", BARE], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    place.stack.callback(bare.wait)
    place.stack.callback(bare.kill)
    assert bare.stdout is not None
    bare.stdout.readline()
    with _serving(place, environment) as (process, url):
        _first_answer(url, "/-/ready", process)
        progress.sleep(SETTLE_SECONDS)
        share, idle = cpu_shares(progress, (process.pid, server.pid), given.seconds)
        held, base = (resident_bytes(pid) / 2**20 for pid in (process.pid, bare.pid))
    return [
        compared("RSS at rest", held, "MiB", "Python with FastAPI and uvicorn", base, RESIDENT_RATIO),
        compared("CPU at rest", share, "% of a core", "an idle uvicorn", idle, CPU_RATIO),
    ]


def _environment(place: Place) -> dict[str, str]:
    return {**compiling_once(place.environment(), place.folder / "bytecode"), "PYTHONPATH": str(REPOSITORY)}


@contextmanager
def _serving(place: Place, environment: Mapping[str, str]) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """An exporter that has just been started, and its URL."""
    path: Path = place.folder / "footprint.sock"
    path.unlink(missing_ok=True)
    command = [sys.executable, "-m", "gpumem_exporter", "serve"]
    command += ["--web.listen-address", "127.0.0.1:0", "--web.listen-socket", str(path)]
    process = subprocess.Popen(command, env=dict(environment), stderr=subprocess.DEVNULL, cwd=REPOSITORY)
    try:
        yield process, f"unix://{path}"
    finally:
        process.terminate()
        process.wait(patient(30))


def _first_answer(url: str, path: str, process: subprocess.Popen[bytes]) -> float:
    """The time of the first reply with status 200."""

    def answered() -> float:
        if process.poll() is not None:
            raise RuntimeError(f"the exporter ended with {process.returncode}")
        client = Http(url)
        try:
            client.timed("GET", path)
        except (OSError, RuntimeError):
            return 0.0
        finally:
            client.close()
        return time.perf_counter()

    return eventually(answered, what=f"a reply to GET {path}")


if __name__ == "__main__":
    sys.exit(main())
