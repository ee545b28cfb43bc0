"""The series that Prometheus would scrape from the demo in some simulated hours, computed without sockets in seconds.

The node runs on a simulated clock. Its reports and the scrapes use the real application through its ASGI interface,
and the polls use the real poller.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from fastapi import FastAPI

from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.process import SimulatedProcess
from gpumem_exporter.demo.simulation import TICK_SECONDS
from gpumem_exporter.demo.workloads import DEMO_WORKLOADS, Workload
from gpumem_exporter.server.app import create_app
from gpumem_exporter.server.security.peer import Peer
from gpumem_exporter.server.settings import load_settings
from gpumem_exporter.wire.protocol import REPORTS_PATH, to_wire

TARGET = 'instance="demo:9844",job="gpumem"'
_SERIES = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


@dataclass
class History:
    """The values of every series by its name and labels in PromQL; None if a scrape does not have the series."""

    interval_seconds: int
    scrapes: int = 0
    series: dict[str, list[str | None]] = field(default_factory=dict)

    @property
    def seconds(self) -> int:
        """The time of the last scrape; the first scrape is at 0."""
        return (self.scrapes - 1) * self.interval_seconds

    def scrape(self, page: str, names: Collection[str]) -> None:
        """Add the series with these names from one scrape."""
        for line in page.splitlines():
            if line[0] != "#" and line[: line.find("{")] in names:
                self._add(line)
        self._add("up 1")
        self.scrapes += 1
        for values in self.series.values():
            if len(values) < self.scrapes:
                values.append(None)

    def _add(self, line: str) -> None:
        match = _SERIES.fullmatch(line)
        assert match is not None, line
        name, labels, value = match.groups()
        key = f"{name}{{{TARGET}{',' if labels else ''}{labels or ''}}}"
        values = self.series.setdefault(key, [None] * self.scrapes)
        assert len(values) == self.scrapes, f"two of {key}"
        values.append(value)


def demo_history(
    *,
    seconds: int,
    interval_seconds: int,
    names: Collection[str],
    workloads: Sequence[Workload] = DEMO_WORKLOADS,
) -> History:
    """Run the demo for `seconds` and scrape these metrics from its start."""
    return asyncio.run(_run(seconds, interval_seconds, names, workloads))


async def _run(seconds: int, interval_seconds: int, names: Collection[str], workloads: Sequence[Workload]) -> History:
    now = 0.0

    def clock() -> float:
        return now

    rng = Random(0)
    node = DemoNode(clock=clock, workloads=workloads)
    app = create_app(load_settings({}, {}), provider=node.provider, host=node.host, clock=clock, wall_clock=clock)
    runtime = app.state.runtime
    reporters: dict[int, _Reporter] = {}
    history = History(interval_seconds)
    runtime.events.log.start()
    runtime.poller._poll()
    try:
        for tick in range(int(seconds / TICK_SECONDS) + 1):
            now = tick * TICK_SECONDS
            node.simulation.advance(now)
            to_scrape = -now % interval_seconds
            for process in node.simulation.processes():
                if process.reports and process.pid not in reporters:
                    reporters[process.pid] = _Reporter(app, process)
            for reporter in list(reporters.values()):
                # A report is up to a second old when it is scraped. Reports between the scrapes are left out, except
                # those with news.
                due = reporter.report_before_scrape_seconds == to_scrape
                if due or reporter.has_news:
                    await reporter.report()
                if due:
                    reporter.report_before_scrape_seconds = rng.choice((0.0, TICK_SECONDS))
                if reporter.process.ended:
                    del reporters[reporter.process.pid]
            if to_scrape == 0:
                runtime.poller._poll()
                runtime.presence.sweep()
                history.scrape((await request(app, "GET", "/metrics")).decode(), names)
    finally:
        runtime.events.log.stop(5.0)
    return history


class _Reporter:
    """The reporter of one simulated process."""

    def __init__(self, app: FastAPI, process: SimulatedProcess) -> None:
        self.process = process
        self.report_before_scrape_seconds = 0.0
        self._app = app
        self._sequence = 0

    @property
    def has_news(self) -> bool:
        """Whether the reporter has an error or the end of the process to report."""
        return self.process.ended or bool(self.process.unreported_ooms)

    async def report(self) -> None:
        """Report once, unless the process crashed."""
        if self.process.crashed:
            return
        self._sequence += 1
        report = self.process.report(self._sequence, final=self.process.ended)
        await request(self._app, "POST", REPORTS_PATH, to_wire(report))
        self.process.acknowledge(report)


async def request(app: FastAPI, method: str, path: str, document: Any = None) -> bytes:
    """Send one request from loopback and return the body of the answer."""
    body = b"" if document is None else json.dumps(document).encode()
    answer = bytearray()
    status = 0

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        answer.extend(message.get("body", b""))

    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 50000),
        "state": {"peer": Peer("127.0.0.1", uid=os.geteuid())},
        "server": ("127.0.0.1", 9844),
    }
    await app(scope, receive, send)
    assert status == 200, (method, path, status, bytes(answer))
    return bytes(answer)
