"""Programs of a hostile local user. Each costs the exporter as much memory or time as one way of attack can.

A program runs in a process of its own, as `ATTACKER_UID` and with plain sockets, until it is killed. Only
`root_of_a_container` keeps uid 0, in a PID namespace.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.snapshots import identity, report
from gpumem_client.wire import procfs
from gpumem_client.wire.protocol import (
    REPORTS_PATH,
    CommandResult,
    DeviceResult,
    OutOfMemory,
    ProcessIdentity,
    Report,
    SnapshotFile,
    to_wire,
)

ATTACKER_UID = 1001
JOB = "4711"
"""The Slurm job id of the attacker's processes."""

_NEW_PID_NAMESPACE = 0x20000000
_PR_SET_PDEATHSIG = 1
_LONG = 120
"""Characters of a long name."""


@dataclass(frozen=True, slots=True)
class Target:
    """The exporter under attack."""

    socket: str
    """The path of its unix socket."""
    port: int
    """Its TCP port on loopback."""
    uuids: tuple[str, ...]
    """Its devices."""


def attack(name: str, target: Target) -> None:
    """Run one of the programs as the attacker until it is killed."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    program = {**ATTACKS, TLS_ATTACK: unfinished_handshakes}[name]
    if program is not root_of_a_container:
        os.setgroups([])
        os.setgid(ATTACKER_UID)
        os.setuid(ATTACKER_UID)
    while True:
        with contextlib.suppress(OSError):
            program(target)
        time.sleep(0.05)


def unknown_names(target: Target) -> None:
    """POST targets of 8 KB with names that resemble the workloads of 100 processes and match none of them."""
    identities = [replace(_identity_of(pid), workload=f"{'ab' * 60}{pid}") for pid in _idle_children(100)]
    for sequence in itertools.count(1):
        for of in identities:
            _report(target, report(of, target.uuids[:1], sequence))
        _act(target, {"workload": [f"{'ba' * 57}{sequence:08}-{each}" for each in range(60)]}, dry_run=True)


def unread_pages(target: Target) -> None:
    """Request 150 pages of metrics and read none."""
    opened = _connections(target, 150, receive_buffer_bytes=4096)
    for connection in opened:
        _send(connection, _head("GET", "/metrics", 0))
    time.sleep(10)
    _close(opened)


def large_results(target: Target) -> None:
    """In eight processes, answer the process's own actions with the largest results, and read the list of actions."""
    _multiply(8)
    of = replace(_own_identity(), session=os.urandom(8).hex())
    results: tuple[CommandResult, ...] = ()
    for sequence in itertools.count(1):
        sent = replace(report(of, target.uuids, sequence), actions=("snapshot",), results=results)
        reply = _report(target, sent)
        results = tuple(_large_result(command["id"]) for command in reply.get("commands", ()))[:4]
        if not results:
            _act(target, {"pid": of.pid}, action="snapshot")
        _request(target, "GET", "/api/v1/actions", read=sequence % 8 == 0)


def job_documents(target: Target) -> None:
    """Fill the events with ends of a job's processes, and request the job's document eight times at once."""
    of = _own_identity()
    for number in range(200):
        started = replace(of, session=f"{number}", workload="x" * _LONG)
        _report(target, replace(report(started, target.uuids, 1), final=True))
    opened = _connections(target, 8)
    for connection in opened:
        _send(connection, _head("GET", f"/api/v1/jobs/{JOB}", 0))
    for connection in opened:
        connection.recv(1 << 16)
    _close(opened)


def many_events(target: Target) -> None:
    """Produce out-of-memory errors, starts and ends of processes, and audit entries, as fast as possible."""
    of = _own_identity()
    for number in itertools.count():
        session = replace(of, session=f"{number}", session_started_seconds=time.monotonic(), workload="y" * _LONG)
        errors = tuple(OutOfMemory(uuid=target.uuids[0], number=each) for each in range(50))
        _report(target, replace(report(session, target.uuids[:1], 1), ooms=errors))
        _act(target, {"pid": of.pid}, action="reset_peak", deadline_seconds=1, reason="z" * 900)


def one_byte(target: Target) -> None:
    """Keep 1,600 connections that have sent one byte of a request."""
    opened = _connections(target, 1600)
    for connection in opened:
        _send(connection, b"G")
    time.sleep(2)
    _close(opened)


def half_sent_bodies(target: Target) -> None:
    """Keep 600 connections with most of a report of 1 MB."""
    opened = _connections(target, 600)
    for connection in opened:
        connection.setblocking(False)
        _send(connection, _head("POST", REPORTS_PATH, 1_000_000) + b" " * 900_000)
    time.sleep(5)
    _close(opened)


def silent(target: Target) -> None:
    """Keep 10,000 connections that send nothing."""
    opened = _connections(target, 10_000)
    time.sleep(2)
    _close(opened)


def garbage(target: Target) -> None:
    """Send reports of 1 MB with 64 invalid devices, on 100 connections at once."""
    document = {"devices": [{"phase_peak_bytes": {"x": -1}}] * 64, "unknown": [[1]] * 160_000}
    body = json.dumps(document).encode()
    _posts_at_once(target, REPORTS_PATH, body, 100)


def event_readers(target: Target) -> None:
    """Read the largest pages of events on 20 connections."""
    opened = _connections(target, 20)
    for connection in opened:
        _send(connection, _head("GET", "/api/v1/events?limit=1000", 0) * 4)
    for connection in opened:
        while connection.recv(1 << 20):
            pass
    _close(opened)


def root_of_a_container(target: Target) -> None:
    """As root of a PID namespace, send first reports on 40 new connections over loopback."""
    _enter_a_pid_namespace()
    body = json.dumps(to_wire(report(replace(_own_identity(), pid=1), target.uuids, 1))).encode()
    while True:
        _posts_at_once(target, REPORTS_PATH, body, 40, tcp=True)


def unfinished_handshakes(target: Target) -> None:
    """Keep 9,000 TLS connections that never finish the handshake."""
    opened = _connections(target, 9000, tcp=True)
    for connection in opened:
        _send(connection, b"\x16\x03\x01\x02\x00\x01")  # the start of a ClientHello
    time.sleep(10)
    _close(opened)


ATTACKS: dict[str, Callable[[Target], None]] = {
    "8 KB of unknown names": unknown_names,
    "150 unread pages of metrics": unread_pages,
    "large results of actions": large_results,
    "eight documents of a job": job_documents,
    "floods of events and audit entries": many_events,
    "1,600 connections with one byte": one_byte,
    "600 half-sent bodies": half_sent_bodies,
    "10,000 silent connections": silent,
    "100 senders of garbage": garbage,
    "20 readers of events": event_readers,
    "40 connections of a container's root": root_of_a_container,
}
TLS_ATTACK = "9,000 unfinished TLS handshakes"


# A program is called again after each error, so what forks is cached.


@cache
def _idle_children(count: int) -> tuple[int, ...]:
    """Start processes that end with this one; return their pids."""
    pids = []
    for _ in range(count):
        child = os.fork()
        if not child:
            _end_with_the_parent()
            while True:
                signal.pause()
        pids.append(child)
    return tuple(pids)


@cache
def _multiply(count: int) -> None:
    """Let this number of processes run the program."""
    for _ in range(count - 1):
        if not os.fork():
            _end_with_the_parent()
            break


@cache
def _enter_a_pid_namespace() -> None:
    """Let a child in a PID namespace of its own run the program, in place of this process."""
    if ctypes.CDLL(None).unshare(_NEW_PID_NAMESPACE) != 0:
        raise SystemExit("a PID namespace cannot be made here")
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        os._exit(0)
    _end_with_the_parent()


def _end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _own_identity() -> ProcessIdentity:
    return _identity_of(os.getpid())


def _identity_of(pid: int) -> ProcessIdentity:
    return replace(
        identity(
            pid,
            start_time_ticks=procfs.start_time_ticks(f"/proc/{pid}"),
            pid_namespace=procfs.pid_namespace(),
            started=time.monotonic(),
        ),
        slurm_job_id=JOB,
    )


def _large_result(command: str) -> CommandResult:
    devices = tuple(DeviceResult(f"GPU-{number:032}", 1 << 30, 1 << 20, 1, 1, 1 << 29) for number in range(64))
    snapshot = SnapshotFile("p" * 4000, 1, 1, 1, has_frames=True)
    return CommandResult(command, "done", "r" * 2000, duration_seconds=1.0, devices=devices, snapshot=snapshot)


def _connections(
    target: Target, count: int, *, tcp: bool = False, receive_buffer_bytes: int = 0
) -> list[socket.socket]:
    """Open connections until the exporter accepts no more within a second."""
    opened: list[socket.socket] = []
    with contextlib.suppress(OSError):
        for _ in range(count):
            connection = socket.socket(socket.AF_INET if tcp else socket.AF_UNIX)
            opened.append(connection)
            connection.settimeout(1.0)
            if receive_buffer_bytes:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
            connection.connect(("127.0.0.1", target.port) if tcp else target.socket)
    for connection in opened:
        connection.settimeout(30.0)
    return opened


def _close(opened: Sequence[socket.socket]) -> None:
    for connection in opened:
        connection.close()


def _posts_at_once(target: Target, path: str, body: bytes, count: int, *, tcp: bool = False) -> None:
    opened = _connections(target, count, tcp=tcp)
    for connection in opened:
        _send(connection, _head("POST", path, len(body)) + body)
    for connection in opened:
        with contextlib.suppress(OSError):
            connection.recv(1 << 16)
    _close(opened)


def _send(connection: socket.socket, sent: bytes) -> None:
    with contextlib.suppress(OSError):
        connection.sendall(sent)


def _report(target: Target, sent: Report) -> Any:
    return _request(target, "POST", REPORTS_PATH, to_wire(sent))


def _act(target: Target, selected: Any, *, action: str = "empty_cache", **options: Any) -> None:
    _request(target, "POST", "/api/v1/actions", {"action": action, "target": selected, "wait_seconds": 0, **options})


def _request(target: Target, method: str, path: str, document: Any = None, *, read: bool = True) -> Any:
    """Send a request on a new connection; return the document of a reply with status 200, else an empty one."""
    body = b"" if document is None else json.dumps(document).encode()
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(60.0)
        connection.connect(target.socket)
        connection.sendall(_head(method, path, len(body), "close") + body)
        received = bytearray()
        while read and (data := connection.recv(1 << 20)):
            received += data
    head, _, text = bytes(received).partition(b"\r\n\r\n")
    return json.loads(text) if head.startswith(b"HTTP/1.1 200") else {}


def _head(method: str, path: str, length: int, connection: str = "keep-alive") -> bytes:
    lines = (
        f"{method} {path} HTTP/1.1",
        "Host: localhost",
        f"Connection: {connection}",
        *(("Content-Type: application/json", f"Content-Length: {length}") if method == "POST" else ()),
    )
    return "\r\n".join((*lines, "", "")).encode()
