"""Simulated reporters for benchmarks: raw long-poll clients whose reports are built as the real ones' are."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import random
import subprocess
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from urllib.parse import urlsplit

from benchmarks.exposition import COMPONENTS, GIB, PHASES
from gpumem_exporter import procfs
from gpumem_exporter.protocol import REPORTS_PATH, DeviceSample, ProcessIdentity, Report, to_wire

__all__ = ["HELD_BYTES", "Stand", "probe", "report_body", "report_for_ever"]

HELD_BYTES = GIB
"""What the driver says of each simulated process on each device; its allocator reserves less."""

_MORE_PHASES = (*PHASES, "gather", "scatter", "validate")
"""15 phases, 4 components and 15 figures: with what the exporter derives, about 40 series of a process on a device."""


class Stand:
    """Processes that do nothing, for reporters that are not there: the exporter finds them in /proc and counts them."""

    def __init__(self, count: int) -> None:
        self._idle = [subprocess.Popen(["sleep", "infinity"]) for _ in range(count)]
        self.pids = tuple(process.pid for process in self._idle)

    def __enter__(self) -> Stand:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._idle:
            process.kill()
        for process in self._idle:
            process.wait()


def report_for_ever(url: str, pids: Sequence[int], uuids: Sequence[str], interval_seconds: float) -> None:
    """One reporter for each pid, their reports spread evenly over the interval, each held until the next is due."""
    asyncio.run(_report_all(urlsplit(url).port or 80, pids, uuids, interval_seconds))


def probe(url: str, pid: int, uuids: Sequence[str], seconds: float, rate_hz: float, answer: Connection) -> None:
    """Send reports that ask for an answer at once; answers (sent, took) of each, in monotonic seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", urlsplit(url).port)
    connection.connect()
    identity = _identity(pid)
    times: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(random.uniform(0.5, 1.5) / rate_hz)
        body = _body(identity, len(times) + 1, uuids, 0.0)
        begun = time.monotonic()
        connection.request("POST", REPORTS_PATH, body, {"Content-Type": "application/json"})
        with connection.getresponse() as response:
            response.read()
            if response.status != 200:
                raise RuntimeError(f"a report was answered {response.status}")
        times.append((begun, time.monotonic() - begun))
    answer.send(times)


async def _report_all(port: int, pids: Sequence[int], uuids: Sequence[str], interval_seconds: float) -> None:
    async def one(place: int, pid: int) -> None:
        await asyncio.sleep(place / len(pids) * interval_seconds)
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        identity, sequence = _identity(pid), 0
        while True:
            sequence += 1
            begun = time.monotonic()
            body = _body(identity, sequence, uuids, interval_seconds)
            head = f"POST {REPORTS_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
            writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            answered = await reader.readuntil(b"\r\n\r\n")
            if not answered.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(f"a report was answered {answered!r}")
            length = answered.lower().partition(b"content-length:")[2].split()[0]
            await reader.readexactly(int(length))
            await asyncio.sleep(max(0.0, begun + interval_seconds - time.monotonic()))

    await asyncio.gather(*(one(place, pid) for place, pid in enumerate(pids)))


def report_body(pid: int, uuids: Sequence[str], *, hold_seconds: float) -> bytes:
    """A first report of a process, as it goes over the wire."""
    return _body(_identity(pid), 1, uuids, hold_seconds)


def _identity(pid: int) -> ProcessIdentity:
    return ProcessIdentity(
        pid=pid,
        start_time_ticks=procfs.start_time_ticks(f"/proc/{pid}"),
        pid_namespace=procfs.pid_namespace(),
        session=os.urandom(8).hex(),
        session_started_seconds=time.monotonic(),
        workload="llm-pretrain",
        rank=str(pid),
        command="python train.py",
        torch_version="2.15.0+cu132",
    )


def _body(identity: ProcessIdentity, sequence: int, uuids: Sequence[str], hold_seconds: float) -> bytes:
    base = GIB // 4 + 4096 * sequence + identity.pid
    samples = tuple(
        DeviceSample(
            uuid=uuid,
            allocated_bytes=base + index,
            reserved_bytes=base + 900_000,
            active_bytes=base + index,
            inactive_split_bytes=70_000 + sequence,
            requested_bytes=base - 5000,
            allocated_peak_bytes=base + 500_000,
            reserved_peak_bytes=base + 900_000,
            private_pools_bytes=2048 + sequence,
            reclaimable_bytes=700_000 + sequence,
            alloc_retries=sequence,
            ooms=sequence // 2,
            segments_allocated=500 + sequence,
            segments_freed=300 + sequence,
            cache_flushes=12 + sequence,
            phase_peak_bytes={phase: base + place for place, phase in enumerate(_MORE_PHASES)},
            component_bytes={component: base // 4 + place for place, component in enumerate(COMPONENTS)},
        )
        for index, uuid in enumerate(uuids)
    )
    report = Report(
        identity,
        sequence=sequence,
        devices=samples,
        pinned_host_bytes=10**6 + sequence,
        step=sequence,
        actions=("empty_cache", "collect_garbage", "reset_peak"),
        hold_seconds=hold_seconds,
    )
    return json.dumps(to_wire(report), separators=(",", ":")).encode()
