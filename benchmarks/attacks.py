"""What a hostile local user can cost the exporter: its memory, and the waits of other clients.

    python -m benchmarks.attacks [--quick] [--json] [--only WORD] [--soak MINUTES]

64 reporters on 8 devices report all the time. Each attack runs alone. Meanwhile root scrapes and requests dry runs of
a clear, and another user sends the first reports of connections. With `--soak`, all attacks run at once for a sixth of
the time instead, between a quiet third and a quiet half. Needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

import trustme

from benchmarks.attackers import ATTACKS, TLS_ATTACK, Target, attack
from benchmarks.claims import Options, Progress, Row, percentile, show
from benchmarks.place import Http, Place, resident_bytes
from benchmarks.reporters import HELD_BYTES, Stand, report_body, report_for_ever
from gpumem_client.wire.errors import ExporterUnreachableError
from tests.support.builders.certificates import issue
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import patient, wait_for

REPORTERS, DEVICES = 64, 8
MIB = 1 << 20
ONE_ATTACK_MIB, ALL_ATTACKS_MIB = 160, 256
"""The limits of the exporter's resident memory. The manifests limit it to 256 MiB."""
REMAINING_MIB = 24
"""What may remain of the attacks in the exporter's heap."""
VICTIM_UID = 1002
PAUSE_SECONDS = 0.5
REQUEST_SECONDS = 60.0

DRY_RUN = json.dumps({"action": "empty_cache", "target": {"all": True}, "dry_run": True}).encode()
SCRAPE, CLEAR, REPORT = CLIENTS = ("a scrape", "a dry run of root", "a first report")


@dataclass(frozen=True, slots=True)
class Wait:
    """One request of a client, on a new connection."""

    started_seconds: float
    taken_seconds: float
    problem: str
    """Why no reply with status 200 came; empty if one came."""


@dataclass(slots=True)
class Clients:
    """The other clients of the exporter, each in a process of its own."""

    running: dict[str, tuple[BaseProcess, Connection]] = field(default_factory=dict)

    def start(self, target: Target) -> None:
        """Start all of them."""
        context = multiprocessing.get_context("spawn")
        for what in CLIENTS:
            here, there = context.Pipe()
            process = context.Process(target=request_for_ever, args=(what, target, there), daemon=True)
            process.start()
            self.running[what] = process, here

    def stop(self) -> dict[str, list[Wait]]:
        """Stop all of them and return their requests."""
        for _, pipe in self.running.values():
            pipe.send(None)
        return {what: _received(pipe) for what, (_, pipe) in self.running.items()}


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--seconds", 20.0, 8.0, "seconds of each attack")
    options.parser.add_argument("--only", default="", help="only the attacks with this word in their names")
    options.parser.add_argument("--soak", type=float, default=0.0, help="minutes of a run with all attacks at once")
    given = options.read()
    if os.geteuid() != 0:
        options.parser.error("root is needed, to act as several users")
    names = [name for name in (*ATTACKS, TLS_ATTACK) if given.only in name]
    progress = Progress("attacks", 3 if given.soak else len(names))
    if given.soak:
        return show("attacks, all at once", soak(given, progress, names), as_json=given.json)
    rows = []
    for name in names:
        progress.part(name)
        with Place(real_gpu=False, devices=DEVICES) as place:
            rows += alone(given, progress, place, name)
    return show("attacks", rows, as_json=given.json)


def alone(given: argparse.Namespace, progress: Progress, place: Place, name: str) -> list[Row]:
    """One attack."""
    exporter, target = serve(place, tls=name == TLS_ATTACK)
    clients = Clients()
    clients.start(target)
    progress.sleep(given.seconds / 2)
    before = resident_bytes(exporter.pid) >> 20
    started = time.monotonic()
    with attacked([name], target):
        progress.sleep(given.seconds)
    ended = time.monotonic()
    requests = clients.stop()
    rows = [
        Row(f"{name}: highest RSS", exporter.peak_bytes() / MIB, "MiB", f"before ({before} MiB)", limit=ONE_ATTACK_MIB)
    ]
    for what, waits in requests.items():
        during = [wait for wait in waits if wait.started_seconds + wait.taken_seconds > started]
        during = [wait for wait in during if wait.started_seconds < ended]
        quiet = [wait for wait in waits if wait not in during]
        rows.append(Row(f"{name}: longest wait for {what}", longest(during), "s", f"before ({longest(quiet):.3g} s)"))
        rows.append(lost(f"{name}: lost of {len(during)}: {what}", during, limit=1))
    return rows


def soak(given: argparse.Namespace, progress: Progress, names: Sequence[str]) -> list[Row]:
    """All attacks at once."""
    sixth = given.soak * 60 / 6
    with Place(real_gpu=False, devices=DEVICES) as place:
        exporter, target = serve(place, tls=False)
        recorded = record(exporter)
        clients = Clients()
        clients.start(target)
        progress.part("before the attacks")
        progress.sleep(2 * sixth)
        before = resident_bytes(exporter.pid) >> 20
        progress.part("all attacks at once")
        started = time.monotonic()
        with attacked([name for name in names if name != TLS_ATTACK], target):
            progress.sleep(sixth)
        ended = time.monotonic()
        highest = exporter.peak_bytes() / MIB
        progress.part("after the attacks")
        progress.sleep(3 * sixth)
        after = resident_bytes(exporter.pid) >> 20
        missing = recorded - {event["detail"]["id"] for event in exporter.events(type="action")}
        rows = [
            Row("highest RSS during the attacks", highest, "MiB", f"before ({before} MiB)", limit=ALL_ATTACKS_MIB),
            Row("RSS that remained", after - before, "MiB", f"before ({before} MiB)", limit=REMAINING_MIB),
            Row(f"missing of {len(recorded)} actions of root in the audit log", len(missing), "", limit=1),
        ]
        for what, waits in clients.stop().items():
            during = [wait for wait in waits if started <= wait.started_seconds + wait.taken_seconds]
            during = [wait for wait in during if wait.started_seconds <= ended]
            quiet = [wait for wait in waits if wait not in during]
            typical_wait = percentile([wait.taken_seconds for wait in during], 0.99)
            rows += [
                Row(f"{what}: longest wait during them", longest(during), "s", f"otherwise ({longest(quiet):.3g} s)"),
                Row(f"{what}: 99 % of the waits during them", typical_wait, "s"),
                lost(f"{what}: lost during them, of {len(during)}", during),
                lost(f"{what}: lost otherwise, of {len(quiet)}", quiet, limit=1),
            ]
        return rows


def longest(waits: Sequence[Wait]) -> float:
    """Return the longest wait; 0 without a request."""
    return max((wait.taken_seconds for wait in waits), default=0.0)


def lost(what: str, waits: Sequence[Wait], limit: float | None = None) -> Row:
    """Return a row with the number of requests without a reply, and the most frequent reason."""
    problems = [wait.problem for wait in waits if wait.problem]
    return Row(what, len(problems), "", max(problems, key=problems.count, default="")[:60], limit=limit)


def serve(place: Place, *, tls: bool) -> tuple[ExporterProcess, Target]:
    """Start the exporter and its reporters, and wait until all of them report."""
    stand = place.stack.enter_context(Stand(REPORTERS))
    assert place.node is not None
    for pid in stand.pids:
        for device in range(DEVICES):
            place.node.set_process(pid, device, HELD_BYTES)
    place.folder.chmod(0o755)  # other users reach the socket
    folder = place.folder / "exporter"
    folder.mkdir(mode=0o755)
    flags = ["--storage.path", str(place.folder / "events")]
    if tls:
        issue(trustme.CA(), folder)
        (folder / "web.yml").write_text("tls_server_config: {cert_file: tls.crt, key_file: tls.key}\n")
        flags += ["--web.config.file", str(folder / "web.yml")]
    exporter = ExporterProcess(folder, *flags, environment=place.environment())
    place.stack.callback(exporter.close)
    uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
    place.start(report_for_ever, exporter.url, stand.pids, uuids, 1.0)
    wait_for(lambda: len(exporter.processes()) >= REPORTERS, f"{REPORTERS} reporting processes")
    return exporter, Target(str(exporter.socket), int(exporter.tcp_url.rpartition(":")[2]), tuple(uuids))


def request_for_ever(what: str, target: Target, pipe: Connection) -> None:
    """Repeat the request of one client until the pipe says stop; then send all waits."""
    if what == REPORT:
        os.setgroups([])
        os.setgid(VICTIM_UID)
        os.setuid(VICTIM_UID)
    url = f"unix://{target.socket}"
    waits = []
    for number in itertools.count(1):
        if pipe.poll(PAUSE_SECONDS):
            pipe.send(waits)
            return
        method, path, body = {
            SCRAPE: ("GET", "/metrics", None),
            CLEAR: ("POST", "/api/v1/actions", DRY_RUN),
            REPORT: (
                "POST",
                "/api/v1/reports",
                report_body(os.getpid(), target.uuids, hold_seconds=0.0, sequence=number),
            ),
        }[what]
        started, problem = time.monotonic(), ""
        try:
            with contextlib.closing(Http(url, REQUEST_SECONDS)) as client:
                client.timed(method, path, body)
        except (ExporterUnreachableError, RuntimeError) as error:
            problem = str(error) or type(error).__name__
        waits.append(Wait(started, time.monotonic() - started, problem))


@contextlib.contextmanager
def attacked(names: Sequence[str], target: Target) -> Iterator[None]:
    """Run attacks, each in a process of its own."""
    context = multiprocessing.get_context("spawn")
    running: list[BaseProcess] = [context.Process(target=attack, args=(name, target)) for name in names]
    for process in running:
        process.start()
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.join()


def record(exporter: ExporterProcess) -> set[str]:
    """Request ten actions as root, which expire; return their ids."""
    options = {"deadline_seconds": 1, "wait_seconds": 0, "expect": 202}
    return {exporter.act("reset_peak", target={"all": True}, **options)["id"] for _ in range(10)}


def _received(pipe: Connection) -> list[Wait]:
    if not pipe.poll(patient(2 * REQUEST_SECONDS)):
        raise RuntimeError("a client did not stop")
    waits: list[Wait] = pipe.recv()
    return waits


if __name__ == "__main__":
    sys.exit(main())
