"""The demo's node at one time, behind a real exporter: the same state for every command that looks at it."""

from __future__ import annotations

import contextlib
import operator
import threading
from collections.abc import Iterator
from functools import partial

from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.node import NodeReporter
from gpumem_exporter.demo.simulation import TICK_SECONDS
from tests.support.running_exporter import running_exporter
from tests.support.waiting import eventually

_SECONDS = 90.0
"""The age of the node. After 60 s the idle cache of its processes is known."""
_TICK_PAUSE_SECONDS = 0.02


class StillDemo:
    """The node and its exporter. Its time stands still, except in `time_passes`."""

    def __init__(self) -> None:
        self.url = ""
        self._now = 1000.0
        self.node = DemoNode(clock=self.clock)
        self._reporter: NodeReporter | None = None

    def clock(self) -> float:
        """Return the node's time in seconds."""
        return self._now

    def start(self, url: str) -> None:
        """Let the node grow old, with all its reports."""
        self.url = url
        self._reporter = NodeReporter(self.node.simulation, url)
        end = self._now + _SECONDS
        while self._now < end:
            self._tick()

    @contextlib.contextmanager
    def time_passes(self) -> Iterator[None]:
        """Let time pass, faster than in the demo, so that processes run commands and what they free settles."""
        stopped = threading.Event()

        def run() -> None:
            while not stopped.wait(_TICK_PAUSE_SECONDS):
                self._tick()

        thread = threading.Thread(target=run, name="demo")
        thread.start()
        try:
            yield
        finally:
            stopped.set()
            thread.join()

    def _tick(self) -> None:
        assert self._reporter is not None
        self._now += TICK_SECONDS
        self.node.simulation.advance(self._now)
        self._reporter.report_due(self._now)


@contextlib.contextmanager
def still_demo() -> Iterator[StillDemo]:
    """Run an exporter on the node."""
    demo = StillDemo()
    with running_exporter(provider=demo.node.provider, host=demo.node.host, clock=demo.clock) as exporter:
        demo.start(exporter.url)
        for _ in range(2):  # the first poll may have started before the last report
            last = exporter.sample("gpumem_poll_timestamp_seconds") or 0.0
            eventually(
                lambda: exporter.sample("gpumem_poll_timestamp_seconds") or 0.0,
                partial(operator.lt, last),
                what="a poll",
            )
        yield demo
