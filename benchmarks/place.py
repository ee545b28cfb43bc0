"""Where a benchmark runs: on an emulated node with real torch in real processes, or on this machine's own GPUs."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

from tests.emulation.node import GIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

__all__ = ["Exporter", "Place", "compiling_once", "cpu_seconds", "open_files", "resident_bytes", "thread_seconds"]


_UNLIMITED = ("--action.caller-limit", "1000000", "--action.process-limit", "1000000")
"""Nobody but a benchmark asks so often."""


class Exporter(ExporterProcess):
    """The real exporter in its own process, on a unix socket and on a port of the loopback address."""

    @property
    def tcp_url(self) -> str:
        """As its log says it."""
        return wait_for(self._said, "the exporter's line about its addresses")

    def _said(self) -> str:
        for word in self.log().replace('"', " ").replace(",", " ").replace("=", " ").split():
            if word.startswith("http://127.0.0.1:"):
                return word
        return ""


class Place:
    """A node for one benchmark; a context manager that ends whatever was started in it.

    Args:
        real_gpu: use this machine's GPUs and driver.
        devices: how many the emulated node has.
    """

    def __init__(self, *, real_gpu: bool, devices: int) -> None:
        self._stack = ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="gpumem-benchmark-")))
        self.node: EmulatedNode | None = None
        if not real_gpu:
            self.node = self._stack.enter_context(EmulatedNode(self.folder / "node", devices, 80 * GIB))
        self._exporters = 0

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def environment(self) -> dict[str, str]:
        """Of a program that runs here."""
        return dict(os.environ) if self.node is None else self.node.environment()

    def exporter(self, *flags: str) -> Exporter:
        """Start an exporter here; its first poll is done."""
        self._exporters += 1
        folder = self.folder / f"exporter{self._exporters}"
        folder.mkdir()
        exporter = Exporter(folder, *_UNLIMITED, *flags, environment=self.environment())
        self._stack.callback(exporter.close)
        return exporter

    def torch(self, **environment: str) -> TorchProcess:
        """Start a process with torch here."""
        process = TorchProcess(self.node, environment)
        self._stack.callback(process.close)
        return process


def compiling_once(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """An environment in which Python finds its bytecode in `folder` from the second start on, whatever it is told."""
    told = {name: value for name, value in environment.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**told, "PYTHONPYCACHEPREFIX": str(folder)}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process that ends no thread meanwhile, to the nanosecond (/proc/<pid>/stat knows hundredths)."""
    return sum(thread_seconds(pid, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir())


def thread_seconds(pid: int, tid: int) -> float:
    """CPU time of one thread."""
    return int(Path(f"/proc/{pid}/task/{tid}/schedstat").read_text().split()[0]) / 1e9


def open_files(pid: int) -> int:
    """How many file descriptors a process has, connections among them."""
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def resident_bytes(pid: int) -> int:
    """RSS, as ps and top show it."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"process {pid} has no memory")
