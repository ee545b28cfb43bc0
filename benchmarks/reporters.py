"""Simulated reporters for benchmarks: long-poll clients whose reports have the shape of real ones."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

from benchmarks.snapshots import GIB, identity, report
from gpumem_client.wire import procfs
from gpumem_client.wire.protocol import REPORTS_PATH, ProcessIdentity, to_wire

HELD_BYTES = GIB
"""Driver bytes of each simulated process on each device; its allocator reserves less."""


class Stand:
    """Idle processes whose pids simulated reporters use: the exporter finds them in /proc."""

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
    """Run one reporter per pid. Their reports are spread over the interval, and each is held until the next is due.

    A reporter whose connection ends, or that is asked to come back later, sends its next report on a new connection.
    """
    asyncio.run(_report_all(url, pids, uuids, interval_seconds))


async def _report_all(url: str, pids: Sequence[int], uuids: Sequence[str], interval_seconds: float) -> None:
    async def one(place: int, pid: int) -> None:
        await asyncio.sleep(place / len(pids) * interval_seconds)
        process, sequence = _identity(pid), 0
        while True:
            reader, writer = await _connected(url)
            with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
                while True:
                    sequence += 1
                    started = time.monotonic()
                    if not await _sent(reader, writer, _body(process, sequence, uuids, interval_seconds)):
                        break
                    await asyncio.sleep(max(0.0, started + interval_seconds - time.monotonic()))
            writer.close()
            await asyncio.sleep(interval_seconds)

    await asyncio.gather(*(one(place, pid) for place, pid in enumerate(pids)))


async def _connected(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    parts = urlsplit(url)
    if parts.scheme == "unix":
        return await asyncio.open_unix_connection(parts.path)
    return await asyncio.open_connection("127.0.0.1", parts.port or 80)


async def _sent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes) -> bool:
    """Send a report and read the reply; return False if the exporter has no room for it."""
    head = f"POST {REPORTS_PATH} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    answered = await reader.readuntil(b"\r\n\r\n")
    length = answered.lower().partition(b"content-length:")[2].split()[0]
    text = await reader.readexactly(int(length))
    if answered.startswith(b"HTTP/1.1 503"):
        return False
    if not answered.startswith(b"HTTP/1.1 200"):
        raise RuntimeError(f"a report was answered {answered + text!r}")
    return True


def report_body(pid: int, uuids: Sequence[str], *, hold_seconds: float, sequence: int = 1) -> bytes:
    """Return a report of a process, as it is sent. Each call is another session."""
    return _body(_identity(pid), sequence, uuids, hold_seconds)


def report_bodies(pid: int, uuids: Sequence[str]) -> Iterator[bytes]:
    """Yield the reports of one session of a process without end; each asks for an immediate reply."""
    process = _identity(pid)
    return (_body(process, sequence, uuids, 0.0) for sequence in itertools.count(1))


def _identity(pid: int) -> ProcessIdentity:
    return identity(
        pid,
        start_time_ticks=procfs.start_time_ticks(f"/proc/{pid}"),
        pid_namespace=procfs.pid_namespace(),
        session=os.urandom(8).hex(),
        started=time.monotonic(),
    )


def _body(of: ProcessIdentity, sequence: int, uuids: Sequence[str], hold_seconds: float) -> bytes:
    made = report(of, uuids, sequence, hold_seconds=hold_seconds)
    return json.dumps(to_wire(made), separators=(",", ":")).encode()
