"""How long each route keeps the event loop of the exporter busy, with many processes on many devices.

    python -m benchmarks.event_loop [--quick] [--json]

While the event loop is busy, no other client gets an answer. The exporter runs in a thread of this process, with a
timer of one millisecond in its event loop. Requests come from another process. Each row is how late the timer was at
most, while the route was asked several times in a row. The rows are information: they belong to one machine.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.snapshots import GIB, identity, report, uuid
from gpumem_client.wire.http import Connection
from gpumem_client.wire.protocol import REPORTS_PATH, to_wire
from gpumem_exporter.core.samples import DeviceMemory, ProcessMemory
from gpumem_exporter.nvml.provider import DeviceIdentity
from tests.support.running_exporter import ScriptedProvider, running_exporter

STEP_SECONDS = 0.001
_JSON = {"Content-Type": "application/json"}


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--processes", 200, 200, "reporting processes")
    options.amount("--devices", 8, 8, "devices of each process")
    options.amount("--requests", 20, 5, "requests for each route")
    given = options.read()
    progress = Progress("event_loop", 2)
    progress.part(f"{given.processes} processes on {given.devices} devices: start")
    provider = WideProvider(given.devices, given.processes)
    flags = {"report_expiry": 3600.0, "collect_interval": 1.0, "report_max_processes": 4096}
    with (
        multiprocessing.get_context("spawn").Pool(1) as pool,
        running_exporter(provider=provider, **flags) as exporter,
    ):
        for pid in range(1, given.processes + 1):
            sent = report(identity(pid, start_time_ticks=1000), [uuid(index) for index in range(given.devices)], 1)
            pool.apply(ask, (exporter.url, [("POST", REPORTS_PATH, to_wire(sent))]))
        gc.collect()
        gc.freeze()  # as `serve` does when it starts
        progress.part("requests")
        rows = [Row("no request", longest_block_ms(exporter.loop, lambda: time.sleep(3.0)), "ms")]
        for name, request in routes().items():
            asked = [request] * given.requests
            block = longest_block_ms(exporter.loop, partial(pool.apply, ask, (exporter.url, asked)))
            rows.append(Row(name, block, "ms"))
    return show("event_loop", rows, as_json=given.json)


def routes() -> dict[str, tuple[str, str, Any]]:
    """Return the requests by name."""
    every = {"action": "empty_cache", "target": {"all": True}}
    names = [f"llm-pretrian-{number}" for number in range(400)]
    return {
        "dry run on all": ("POST", "/api/v1/actions", {**every, "dry_run": True}),
        "action on all, not waited for": ("POST", "/api/v1/actions", {**every, "wait_seconds": 0}),
        "list of actions": ("GET", "/api/v1/actions?limit=1000", None),
        "refused body of 64 KiB": ("POST", "/api/v1/actions", {**every, **{f"x{n}": n for n in range(4500)}}),
        "unknown names": ("POST", "/api/v1/actions", {**every, "target": {"workload": names}}),
        "processes": ("GET", "/api/v1/processes", None),
        "devices": ("GET", "/api/v1/devices", None),
        "live": ("GET", "/api/v1/live", None),
        "events": ("GET", "/api/v1/events?limit=1000", None),
        "metrics": ("GET", "/metrics", None),
    }


def ask(url: str, requests: list[tuple[str, str, Any]]) -> None:
    """Send requests, in the other process."""
    connection = Connection(url, timeout_seconds=60.0)
    try:
        for method, path, document in requests:
            body = None if document is None else json.dumps(document).encode()
            answer = connection.request(method, path, body, _JSON)
            assert answer.status in (200, 202, 404, 422), answer
    finally:
        connection.close()


def longest_block_ms(loop: asyncio.AbstractEventLoop, work: Callable[[], object]) -> float:
    """Return how late a timer of the event loop was at most while something was done."""
    latest = 0.0
    done = threading.Event()

    async def watch() -> None:
        nonlocal latest
        while not done.is_set():
            due = time.perf_counter() + STEP_SECONDS
            await asyncio.sleep(STEP_SECONDS)
            latest = max(latest, time.perf_counter() - due)

    watching = asyncio.run_coroutine_threadsafe(watch(), loop)
    work()
    done.set()
    watching.result(60.0)
    return 1e3 * latest


class WideProvider(ScriptedProvider):
    """A driver with many devices, each of which lists all processes."""

    def __init__(self, devices: int, processes: int) -> None:
        super().__init__()
        self._devices = devices
        self._listed = tuple(ProcessMemory(pid, GIB // 2 + pid) for pid in range(1, processes + 1))

    def devices(self) -> tuple[DeviceIdentity, ...]:
        return tuple(DeviceIdentity(gpu=str(i), uuid=uuid(i), name="Scripted") for i in range(self._devices))

    def read_memory(self, _: str) -> DeviceMemory:
        return DeviceMemory(80 * GIB, 60 * GIB, 19 * GIB, GIB)

    def read_processes(self, _: str) -> tuple[ProcessMemory, ...]:
        return self._listed


if __name__ == "__main__":
    raise SystemExit(main())
