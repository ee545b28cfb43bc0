"""The demo's node at one time, behind a real exporter: the same state for every command that looks at it."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.node import TICK_SECONDS
from tests.support.servers.running_exporter import running_exporter
from tests.support.waiting import eventually

_LOOKS, _LOOK_SECONDS = 5, 3.0
"""A finding such as a process without a reporter is shown once it has been found again and again for ten seconds."""
_TICK_PAUSE_SECONDS = 0.02


class StillDemo:
    """The node and its exporter. Its time stands still, except in `time_passes` and `advance`."""

    def __init__(self) -> None:
        self.url = ""
        self._now = 1000.0
        self._origin_unix_seconds = time.time() - self._now - _LOOKS * _LOOK_SECONDS
        self.node = DemoNode(clock=self.clock)

    def clock(self) -> float:
        """Return the node's time in seconds."""
        return self._now

    def wall_clock(self) -> float:
        """Return the node's time in Unix seconds. It is the real time when the node starts to stand still."""
        return self._origin_unix_seconds + self._now

    @property
    def tcp_url(self) -> str:
        """The exporter's URL."""
        return self.url

    def start(self, url: str) -> None:
        """Let the processes report to an exporter."""
        self.url = url
        self.node.connect(url)

    def advance(self, seconds: float) -> None:
        """Let the node grow older by some seconds, with all reports in them, at once."""
        end = self._now + seconds
        while self._now < end:
            self._tick()

    def let_poll(self, polled_unix_seconds: Callable[[], float]) -> None:
        """Wait for the end of a poll. The time advances by a millisecond, so that the poll can be recognized."""
        self._now += 0.001
        eventually(polled_unix_seconds, lambda seconds: seconds > self.wall_clock() - 0.0005, what="a poll")

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
        self._now += TICK_SECONDS
        self.node.advance()


@contextlib.contextmanager
def still_demo(**flags: Any) -> Iterator[StillDemo]:
    """Run an exporter on the node; flags are settings by field name."""
    demo = StillDemo()
    node = demo.node
    with running_exporter(
        provider=node.provider, host=node.host, clock=demo.clock, wall_clock=demo.wall_clock, past=node.past, **flags
    ) as exporter:
        demo.start(exporter.url)
        for _ in range(_LOOKS):
            demo.advance(_LOOK_SECONDS)
            for _ in range(2):  # the first poll may have started before the last report
                demo.let_poll(lambda: exporter.sample("gpumem_poll_timestamp_seconds") or 0.0)
            # Growth is computed twice a minute. On a slow machine, that was before the first report.
            exporter.runtime.view._growths = (float("-inf"), {})
            exporter.get("/api/v1/live")
        yield demo
