"""The alerts of the project's rules over some simulated hours of the demo, evaluated by promtool with `for`.

The series are those that Prometheus would scrape, computed without sockets in seconds: the node runs on a simulated
clock. Its reports and the scrapes use the real application through its ASGI interface, and the polls use the real
poller.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import subprocess
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import yaml
from fastapi import FastAPI

from gpumem_client.reporter.delivery import Outcome
from gpumem_client.wire.protocol import REPORTS_PATH, to_wire
from gpumem_exporter.app import create_app
from gpumem_exporter.core.container import HERE
from gpumem_exporter.demo import DemoNode
from gpumem_exporter.demo.node import TICK_SECONDS
from gpumem_exporter.demo.process import SimulatedProcess, Workload
from gpumem_exporter.edge.peer import Peer
from gpumem_exporter.features.events.event_log import EventLog
from gpumem_exporter.runtime import Runtime
from gpumem_exporter.serve_command import load_settings
from tests.support.builders.builders import state_from
from tests.support.paths import REPOSITORY

RULES = sorted((REPOSITORY / "deploy" / "prometheus" / "rules").glob("*.yml"), reverse=True)
"""The recording rules before the alerts that use them."""
_FOUND = re.compile(r'^ +expr: (".*"), time: (\S+),?\n +exp: nil\n +got: (.*)$', re.MULTILINE)
_SAMPLE = re.compile(r"\{([^}]*)\} (\S+?),?(?= |$)")
_LABEL = re.compile(r'(\w+)="([^"]*)"')
SCRAPE_SECONDS = 15
"""The interval of scrapes and readings. With longer ones the ledger does not find the processes of a reading."""
EVALUATION_SECONDS = 30
"""The interval of evaluations, which take most of promtool's time."""
TARGET = 'instance="demo:9844",job="gpumem"'
_SERIES = re.compile(r"(\w+)(?:\{(.*)\})? (\S+)")


@dataclass
class History:
    """The values of every series by its name and labels in PromQL; None if a scrape does not have the series."""

    scrapes: int = 0
    series: dict[str, list[str | None]] = field(default_factory=dict)
    live: dict[int, Any] = field(default_factory=dict)
    """The content of the live page at some scrapes, by their seconds."""

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


def demo_history(seconds: int, workloads: Sequence[Workload], live_at: Collection[int]) -> History:
    """Run the demo for `seconds`, and scrape what the rules use; read the live page at some of the scrapes."""
    # A reading costs nothing on the simulated clock, too.
    with patch("time.thread_time", return_value=0.0):
        return asyncio.run(_run(seconds, workloads, live_at))


async def _run(seconds: int, workloads: Sequence[Workload], live_at: Collection[int]) -> History:
    now, names = 0.0, _metrics_in_rules()

    def clock() -> float:
        return now

    rng = Random(0)
    node = DemoNode(clock=clock, workloads=workloads)
    runtime = Runtime(load_settings({}, {}), provider=node.provider, host=node.host, clock=clock, wall_clock=clock)
    app = create_app(runtime)
    before_scrape_seconds: dict[SimulatedProcess, float] = {}
    reported_ooms: dict[SimulatedProcess, int] = {}
    history = History()
    log = runtime.journal
    assert isinstance(log, EventLog)
    log.start()
    runtime.poller._poll()
    try:
        for tick in range(int(seconds / TICK_SECONDS) + 1):
            now = tick * TICK_SECONDS
            if tick:
                node.advance()
            to_scrape = -now % SCRAPE_SECONDS
            for process in node.processes.values():
                if process.reports:
                    before_scrape_seconds.setdefault(process, 0.0)
            for process, seconds_before in list(before_scrape_seconds.items()):
                # A report is up to a second old when it is scraped. Reports between the scrapes are left out, except
                # those with news.
                due, ended = seconds_before == to_scrape, process.pid not in node.processes
                ooms = sum(slot.allocator.statistics.ooms for slot in process.slots)
                if not process.crashed and (due or ended or ooms > reported_ooms.get(process, 0)):
                    report = process.loop.final_report() if ended else process.loop.next_report()
                    # Without a hold, which would last forever: the clock stands still during a request.
                    await request(app, "POST", REPORTS_PATH, to_wire(replace(report, hold_seconds=0.0)))
                    process.loop.answered(report, Outcome.ACCEPTED, None)
                    reported_ooms[process] = ooms
                if due:
                    before_scrape_seconds[process] = rng.choice((0.0, TICK_SECONDS))
                if ended:
                    del before_scrape_seconds[process]
            if to_scrape == 0:
                runtime.poller._poll()
                runtime.presence.sweep()
                history.scrape((await request(app, "GET", "/metrics")).decode(), names)
                if now in live_at:
                    history.live[int(now)] = json.loads(await request(app, "GET", "/api/v1/live"))
    finally:
        log.stop(5.0)
    return history


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
        "state": state_from(Peer(uid=os.geteuid(), pid=os.getpid(), place=HERE)),
        "server": ("127.0.0.1", 9844),
    }
    await app(scope, receive, send)
    assert status == 200, (method, path, status, bytes(answer))
    return bytes(answer)


def _metrics_in_rules() -> frozenset[str]:
    """Return the names of the metrics in the rules."""
    return frozenset(name for rules in RULES for name in re.findall(r"\bgpumem_\w+", rules.read_text()))


Labels = dict[str, str]


def evaluated(history: History, folder: Path, questions: Sequence[tuple[str, int]]) -> list[list[tuple[Labels, float]]]:
    """Return the labels and the value of each sample of some expressions, each at a second of a history."""
    promtool = shutil.which("promtool")
    assert promtool, "promtool is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    # promtool prints results only if they differ from the expected ones, so none are expected.
    expected = [{"expr": expression, "eval_time": f"{second}s", "exp_samples": []} for expression, second in questions]
    groups = [group["name"] for path in RULES for group in yaml.safe_load(path.read_text())["groups"]]
    question = {
        "rule_files": list(map(str, RULES)),
        "group_eval_order": groups,  # otherwise promtool chooses one at random
        "evaluation_interval": f"{EVALUATION_SECONDS}s",
        "tests": [
            {
                "interval": f"{SCRAPE_SECONDS}s",
                "input_series": [
                    {"series": series, "values": _notation(values)} for series, values in history.series.items()
                ],
                "promql_expr_test": expected,
            }
        ],
    }
    file = folder / "history.json"
    file.write_text(json.dumps(question))
    run = subprocess.run([promtool, "test", "rules", file], capture_output=True, text=True, timeout=300, check=False)
    answer = run.stdout + run.stderr
    found = {(json.loads(expression), _seconds(time)): got for expression, time, got in _FOUND.findall(answer)}
    assert run.returncode == 0 or found, answer
    return [_samples(found.get(one, "")) for one in questions]


def _seconds(text: str) -> int:
    """Return a duration as promtool writes it: `1h30m15s`."""
    return sum(int(number) * {"h": 3600, "m": 60, "s": 1}[unit] for number, unit in re.findall(r"(\d+)([hms])", text))


def _samples(text: str) -> list[tuple[Labels, float]]:
    return [(dict(_LABEL.findall(labels)), float(value)) for labels, value in _SAMPLE.findall(text)]


def _notation(values: list[str | None]) -> str:
    """Return a series in promtool's notation: `_` is missing, and `stale` ends a series."""
    before = [None, *values]
    return " ".join(
        value if value is not None else "_" if earlier is None else "stale"
        for earlier, value in zip(before, values, strict=False)
    )
