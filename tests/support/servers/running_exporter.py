"""The real server on real sockets in a thread, with a scripted driver and host."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpumem_client.wire.http import Answer, Connection
from gpumem_client.wire.protocol import REPORTS_PATH, ProcessIdentity, Report, to_wire
from gpumem_exporter.core.history_series import Past
from gpumem_exporter.core.readings import DeviceMemory, DeviceReading, ProcessFacts, ProcessMemory
from gpumem_exporter.edge.connections import Limits
from gpumem_exporter.edge.listeners import bind
from gpumem_exporter.edge.problems import ProblemCode
from gpumem_exporter.edge.uvicorn_server import LimitedServer
from gpumem_exporter.errors import NvmlNotSupportedError, NvmlUnavailableError
from gpumem_exporter.runtime import Runtime
from gpumem_exporter.serve_command import load_settings
from gpumem_exporter.serving import build_server
from gpumem_exporter.settings import setting_key
from tests.support.builders.builders import MIB, UUIDS, NobodyHost
from tests.support.servers.exporter_process import Metrics
from tests.support.waiting import eventually, patient

ACTIONS = "/api/v1/actions"


class ScriptedProvider:
    """A driver with two devices. `hanging` makes every call block; `error` makes it unavailable.

    `release_count` counts its releases.
    """

    source = "nvml"

    def __init__(self) -> None:
        self.error = ""
        self.release_count = 0
        self.hanging = threading.Event()
        self.released = threading.Event()
        self.stuck = threading.Event()
        self.processes: dict[str, tuple[ProcessMemory, ...]] = {}

    def _call(self) -> None:
        if self.hanging.is_set():
            self.stuck.set()
            self.released.wait()
        if self.error:
            raise NvmlUnavailableError(self.error)

    def open(self) -> None:
        self._call()

    def close(self) -> None:
        pass

    def release(self) -> None:
        self.release_count += 1

    def driver_version(self) -> str:
        return "999.1"

    def devices(self) -> tuple[DeviceReading, ...]:
        self._call()
        return tuple(DeviceReading(gpu=str(i), uuid=UUIDS[i], name="Scripted") for i in range(2))

    def read_memory(self, uuid: str) -> DeviceMemory:
        self._call()
        return DeviceMemory(1000 * MIB, 400 * MIB, 600 * MIB, 0)

    def read_processes(self, uuid: str) -> tuple[ProcessMemory, ...]:
        return self.processes.get(uuid, ())

    def read_utilization_ratio(self, uuid: str) -> float:
        return 0.5

    def read_active_pids(self, uuid: str) -> frozenset[int]:
        raise NvmlNotSupportedError("not supported")


@dataclass
class ScriptedHost(NobodyHost):
    """A host on which a reporter's pid is the host's pid."""

    dead: set[int] = field(default_factory=set)
    lookups: list[tuple[int, int | None]] = field(default_factory=list)

    def facts(self, pid: int) -> ProcessFacts | None:
        return ProcessFacts(pid, 1000, command="python train.py", user="ada")

    def host_pid(self, identity: ProcessIdentity, peer_pid: int | None) -> int | None:
        self.lookups.append((identity.pid, peer_pid))
        return identity.pid

    def owner_uid(self, identity: ProcessIdentity, host_pid: int | None) -> int | None:
        return os.geteuid()

    def alive(self, host_pid: int, start_time_ticks: int) -> bool:
        return host_pid not in self.dead


def read_answer(sock: socket.socket) -> tuple[int, dict[str, str], bytes]:
    """Read one answer from a connection that stays open."""
    received = b""
    while b"\r\n\r\n" not in received:
        piece = sock.recv(65536)
        assert piece, received
        received += piece
    head, _, body = received.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    while len(body) < int(headers["content-length"]):
        body += sock.recv(65536)
    return int(first.split()[1]), headers, body


@dataclass
class RunningExporter:
    """A running exporter, and methods for requests to it."""

    url: str
    port: int
    runtime: Runtime
    server: LimitedServer
    provider: ScriptedProvider
    host: ScriptedHost
    loop: asyncio.AbstractEventLoop

    @property
    def tcp_url(self) -> str:
        """The URL of its port on the loopback address, as of an `ExporterProcess`."""
        return f"http://127.0.0.1:{self.port}"

    def request(
        self,
        method: str,
        path: str,
        document: Any = None,
        *,
        url: str = "",
        body: bytes | None = None,
        seconds: float = patient(30.0),
        **headers: str,
    ) -> Answer:
        """Send one request on a new connection; underscores in header names become hyphens."""
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        if document is not None:
            body = json.dumps(document).encode()
        if method == "POST":
            sent = {"Content-Type": "application/json", **sent}
        connection = Connection(url or self.url, timeout_seconds=seconds)
        try:
            return connection.request(method, path, body, sent)
        finally:
            connection.close()

    def get(self, path: str, **headers: Any) -> Answer:
        return self.request("GET", path, **headers)

    def document(self, path: str) -> Any:
        return json.loads(self.get(path).body)

    def report(self, sent: Report, **options: Any) -> Answer:
        return self.request("POST", REPORTS_PATH, to_wire(sent), **options)

    def act(self, **document: Any) -> Answer:
        return self.request("POST", ACTIONS, document)

    def metrics(self) -> Metrics:
        return Metrics(self.get("/metrics").body.decode())

    def sample(self, name: str, **labels: str) -> float | None:
        """Return the only sample with this name and these labels; None if there is none."""
        found = self.metrics().values(name, **labels)
        assert len(found) <= 1, found
        return found[0] if found else None


def problem(answer: Answer, status: int) -> Any:
    """Return the problem document of an answer, after checking its status."""
    assert answer.status == status, answer.body
    assert answer.headers["content-type"] == "application/problem+json"
    document = json.loads(answer.body)
    assert document["status"] == status
    assert document["title"]
    assert document["type"]
    assert document["detail"]
    assert status in [code.status for code in ProblemCode if code == document["code"]]
    return document


@contextlib.contextmanager
def running_exporter(
    *,
    provider: Any = None,
    host: Any = None,
    unix: Path | None = None,
    limits: Limits | None = None,
    ready: bool = True,
    clock: Callable[[], float] = time.monotonic,
    wall_clock: Callable[[], float] = time.time,
    past: Past = lambda _: (),
    **flags: Any,
) -> Iterator[RunningExporter]:
    """Run an exporter; flags are settings by field name. `ready` waits for the first poll.

    The driver and the host are scripted by default; `unix` is the path of its unix socket; `flags` are the settings.
    """
    provider = provider or ScriptedProvider()
    host = host or ScriptedHost()
    flags = {"web_listen_address": "127.0.0.1:0", "collect_interval": 0.05, **flags}
    flags["web_listen_socket"] = str(unix) if unix else None
    settings = load_settings({setting_key(name): value for name, value in flags.items()}, {})
    listeners = bind(settings.web_listen_address, settings.web_listen_socket)
    port = listeners.sockets[0].getsockname()[1]
    started = threading.Event()
    loops: list[asyncio.AbstractEventLoop] = []

    def on_started() -> None:
        loops.append(asyncio.get_running_loop())
        started.set()

    runtime = Runtime(settings, provider=provider, host=host, clock=clock, wall_clock=wall_clock, past=past)
    server = build_server(runtime, listeners, on_started=on_started, limits=limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": list(listeners.sockets)}, name="exporter")
    thread.start()
    try:
        assert started.wait(patient(30))
        running = RunningExporter(f"http://127.0.0.1:{port}", port, runtime, server, provider, host, loops[0])
        if ready:
            eventually(lambda: running.get("/-/ready").status, lambda status: status == 200)
        yield running
    finally:
        server.stop()
        if isinstance(provider, ScriptedProvider):
            provider.released.set()
        thread.join(patient(30))
        listeners.close()
        assert not thread.is_alive()
