"""The demo node: the simulation, its driver and host interfaces, and its threads."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from gpumem_exporter.demo.host import DemoHost
from gpumem_exporter.demo.provider import DemoProvider
from gpumem_exporter.demo.reporter import SimulatedReporter
from gpumem_exporter.demo.simulation import TICK_SECONDS, Simulation
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS, Workload

__all__ = ["DemoNode"]


class DemoNode:
    """A simulated node whose processes report to an exporter over HTTP.

    `provider` and `host` work immediately. The processes run and report between `start` and `stop`.

    Args:
        seed: the same seed creates the same node.
        clock: monotonic seconds.
        workloads: the workloads of the node.
    """

    def __init__(
        self,
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
        workloads: Sequence[Workload] = DEMO_WORKLOADS,
    ) -> None:
        self.simulation = Simulation(seed, clock(), workloads)
        self.provider = DemoProvider(self.simulation)
        self.host = DemoHost(self.simulation)
        self._clock = clock
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._reporters: dict[int, SimulatedReporter] = {}

    def start(self, exporter_url: str, *, report_token: str | None = None) -> None:
        """Start the simulation and the reporters. The exporter may start later.

        Args:
            exporter_url: `http://host:port` or `unix:///path`.
            report_token: the token for reports, if the exporter requires one.

        Raises:
            ConfigurationError: the URL has neither of the two forms.
            RuntimeError: the node was already started.
        """
        if self._thread is not None:
            raise RuntimeError("the demo node was already started")
        headers = {} if report_token is None else {"Authorization": f"Bearer {report_token}"}
        self._thread = threading.Thread(target=self._run, args=(exporter_url, headers), name="gpumem-demo", daemon=True)
        self._match_reporters(exporter_url, headers)
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop all threads and wait at most `timeout_seconds`; may be called again."""
        deadline = time.monotonic() + timeout_seconds
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout_seconds)
        for reporter in self._reporters.values():
            reporter.stop()
        for reporter in self._reporters.values():
            reporter.join(max(0.0, deadline - time.monotonic()))

    def _run(self, exporter_url: str, headers: dict[str, str]) -> None:
        while not self._stopping.wait(TICK_SECONDS):
            self.simulation.advance(self._clock())
            self._match_reporters(exporter_url, headers)

    def _match_reporters(self, exporter_url: str, headers: dict[str, str]) -> None:
        """Start a reporter for each new process, and drop the reporters that ended with their process."""
        with self.simulation.lock:
            processes = {process.pid: process for process in self.simulation.processes() if process.reports}
        for pid in [pid for pid in self._reporters if pid not in processes]:
            if self._reporters[pid].join(0.0):
                del self._reporters[pid]
        for pid, process in processes.items():
            if pid not in self._reporters:
                reporter = SimulatedReporter(self.simulation, process, exporter_url, headers=headers, clock=self._clock)
                self._reporters[pid] = reporter
                reporter.start()
