"""Where a benchmark runs: on an emulated node with real torch in real processes, or on this machine's own GPUs."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.claims import Progress
from gpumem_client.wire.http import Connection
from tests.emulation.node import GIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.servers.exporter_process import UNLIMITED, ExporterProcess


class Http:
    """One connection of the client to an exporter or another server. A request is sent in one piece, as a report is."""

    def __init__(self, url: str, timeout_seconds: float = 60.0) -> None:
        self._connection = Connection(url, timeout_seconds=timeout_seconds)
        self.close = self._connection.close

    def timed(self, method: str, path: str, body: bytes | None = None) -> tuple[float, bytes]:
        """Send a request; return the seconds until the last byte of the reply, and its body.

        Raises:
            ExporterUnreachableError: No server answers in time.
            RuntimeError: The status is not 200.
        """
        headers = {} if body is None else {"Content-Type": "application/json"}
        started = time.perf_counter()
        answer = self._connection.request(method, path, body, headers)
        taken = time.perf_counter() - started
        if answer.status != 200:
            raise RuntimeError(f"{method} {path} was answered {answer.status}: {answer.body[:500]!r}")
        return taken, answer.body


class Place:
    """A node for one benchmark. A context manager that ends every process it started.

    Processes are fresh interpreters, never forks of one that has done their imports: their memory and the cost of
    their starts are measured. With `fresh=False` neither is measured.

    Args:
        real_gpu: Use this machine's GPUs and driver.
        devices: Number of devices of the emulated node.
    """

    def __init__(self, *, real_gpu: bool, devices: int, fresh: bool = True) -> None:
        if fresh:
            os.environ["GPUMEM_TEST_ZYGOTE"] = "0"
        self.stack = ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="gpumem-benchmark-")))
        self.node: EmulatedNode | None = None
        if not real_gpu:
            self.node = self.stack.enter_context(EmulatedNode(self.folder / "node", devices, 80 * GIB))
        self._exporters = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.stack.close()

    def environment(self) -> dict[str, str]:
        """Return the environment of a program that runs here."""
        return dict(os.environ) if self.node is None else self.node.environment()

    def exporter(self, *flags: str) -> ExporterProcess:
        """Start an exporter here and wait for its first poll."""
        self._exporters += 1
        folder = self.folder / f"exporter{self._exporters}"
        folder.mkdir()
        exporter = ExporterProcess(folder, *UNLIMITED, *flags, environment=self.environment())
        self.stack.callback(exporter.close)
        return exporter

    def torch(self, **environment: str) -> TorchProcess:
        """Start a process with torch here."""
        process = TorchProcess(self.node, environment)
        self.stack.callback(process.close)
        return process

    def start(self, target: Callable[..., None], *arguments: Any) -> None:
        """Run a function in a process of its own, in a fresh interpreter, until the place closes."""
        process = multiprocessing.get_context("spawn").Process(target=target, args=arguments, daemon=True)
        process.start()
        self.stack.callback(process.join)
        self.stack.callback(process.kill)


def compiling_once(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """Return an environment in which Python stores its bytecode in `folder`, for faster starts after the first."""
    kept = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(folder)}


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process that ends no thread meanwhile, to the nanosecond."""
    return sum(thread_seconds(pid, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir())


def cpu_shares(progress: Progress, pids: Sequence[int], seconds: float) -> list[float]:
    """Return the percent of a core that each process uses during this time."""
    started, used = time.monotonic(), [cpu_seconds(pid) for pid in pids]
    progress.sleep(seconds)
    taken = time.monotonic() - started
    return [100 * (cpu_seconds(pid) - before) / taken for pid, before in zip(pids, used, strict=True)]


def thread_seconds(pid: int, tid: int) -> float:
    """Return the CPU time of one thread, as the scheduler counts it."""
    return int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) / 1e9


def resident_bytes(pid: int) -> int:
    """Return the RSS of a process, as ps and top show it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory")
