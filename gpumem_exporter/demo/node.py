"""The demo node: the simulation, its driver and host interfaces, and the thread that advances it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

from gpumem_exporter.demo.host import DemoHost
from gpumem_exporter.demo.provider import DemoProvider
from gpumem_exporter.demo.reporter import NodeReporter
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
        self._reporter: NodeReporter | None = None

    def start(self, exporter_url: str, *, report_token: str | None = None) -> None:
        """Start the simulation and its reports. The exporter may start later.

        Args:
            exporter_url: `http://host:port` or `unix:///path`.
            report_token: the token for reports, if the exporter requires one.

        Raises:
            ConfigurationError: the URL has neither of the two forms.
            RuntimeError: the node was already started.
        """
        if self._thread is not None:
            raise RuntimeError("the demo node was already started")
        self._reporter = NodeReporter(self.simulation, exporter_url, report_token=report_token)
        self._thread = threading.Thread(target=self._run, args=(self._reporter,), name="gpumem-demo", daemon=True)
        self._thread.start()

    def stop(self, timeout_seconds: float = 5.0) -> None:
        """Stop the thread and wait at most `timeout_seconds`; may be called again."""
        self._stopping.set()
        if self._thread is not None and self._reporter is not None:
            self._reporter.interrupt()
            self._thread.join(timeout_seconds)

    def _run(self, reporter: NodeReporter) -> None:
        while not self._stopping.is_set():
            now = self._clock()
            self.simulation.advance(now)
            reporter.report_due(now)
            self._stopping.wait(TICK_SECONDS)
        reporter.close()
