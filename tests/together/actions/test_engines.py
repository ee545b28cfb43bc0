"""Engines that start, release and resume memory on the emulated node, whose driver lists the results."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.programs import Program
from tests.support.processes.local_users import LocalUser
from tests.support.processes.other_user import needs_root
from tests.support.processes.running_command import run_command
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import patient, wait_for

ALLOW = ("--action.allow", "default,release_memory,resume_memory")
TITLE = "VLLM::APIServer"
WEIGHTS, CACHE = 256 * MIB, 1024 * MIB

ENGINE = """
import http.server
held = {"weights": malloc(256 << 20)[1], "kv_cache": malloc(1024 << 20)[1]}
sizes = {"weights": 256 << 20, "kv_cache": 1024 << 20}
requests = 0
class Handler(http.server.BaseHTTPRequestHandler):
    def answer(self):
        global requests
        path = self.path.partition("?")[0]
        text = json.dumps({"is_sleeping": None in held.values()})
        if path == "/metrics":
            text = f'vllm:num_requests_running{{engine="0"}} {requests}\\nvllm:num_requests_waiting{{engine="0"}} 0\\n'
        elif path == "/requests":
            requests = int(self.path.partition("?")[2])
        elif path in ("/sleep", "/release_kv_cache_memory"):
            for name in () if "level=0" in self.path else ("kv_cache",) if path != "/sleep" else held:
                if held[name]:
                    free(held[name])
                    held[name] = None
        elif path == "/wake_up":
            for name in held:
                held[name] = held[name] or malloc(sizes[name])[1]
            text = json.dumps({"status": "awake"})
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())
    do_GET = do_POST = answer
    def log_message(self, *_):
        pass
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
say(server.server_address[1])
server.serve_forever()
"""
"""vLLM with its development routes, as vllm 0.32.0 has them in entrypoints/serve/dev/sleep/api_router.py."""


def titled(title: str) -> tuple[str, ...]:
    """Return the launcher of a program with this title."""
    return ("bash", "-c", f'exec -a {title} "$0" "$@"')


class Engine:
    """The program, and what it answers."""

    def __init__(self, program: Program) -> None:
        self.program, self.pid, self.port = program, program.pid, program.heard()

    def set_requests(self, count: int) -> None:
        import http.client

        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        connection.request("POST", f"/requests?{count}")
        assert connection.getresponse().status == 200
        connection.close()


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK, *ALLOW)


@pytest.fixture
def engine(node: EmulatedNode, exporter: ExporterProcess) -> Iterator[Engine]:
    with Program(node, ENGINE, environment={"PYTHONHOME": sys.base_prefix}, launcher=titled(TITLE)) as program:
        engine = Engine(program)
        wait_for(lambda: str(engine.pid) in json.dumps(exporter.get("/api/v1/processes")), "the engine")
        yield engine


@pytest.fixture
def act(exporter: ExporterProcess, engine: Engine) -> Callable[..., Any]:
    """Request an action on the engine, and return its only result."""

    def run(action: str, **changes: Any) -> Any:
        # A young engine that has grown counts as starting for three minutes, which its own actions do not wait for.
        document = exporter.act(action, target={"pid": engine.pid}, wait_seconds=30, **changes)
        (result,) = document["results"]
        return result

    return run


def test_an_engine_sleeps_and_wakes_and_the_driver_says_what_that_freed(
    node: EmulatedNode, engine: Engine, act: Callable[..., Any], exporter: ExporterProcess
) -> None:
    before = node.books().used_by(engine.pid)
    dry = act("release_memory", dry_run=True)
    assert (dry["outcome"], dry["driver_before_bytes"], dry["freed_bytes"]) == ("would_release", before, None)
    kept = act("release_memory", keep="weights")
    assert (kept["outcome"], kept["freed_bytes"]) == ("done", CACHE)
    assert kept["driver_after_bytes"] == node.books().used_by(engine.pid) == before - CACHE
    assert act("release_memory")["reason_code"] == "engine_asleep"
    woken = act("resume_memory")
    assert (woken["outcome"], woken["driver_after_bytes"], woken["freed_bytes"]) == ("done", before, None)
    assert act("resume_memory")["reason_code"] == "engine_awake"
    command = run_command("sleep", "--pid", str(engine.pid), "--settle", "1", "--json", "--url", exporter.url)
    slept = json.loads(command.stdout)
    assert slept["freed_bytes"] == slept["still_free_bytes"] == CACHE + WEIGHTS
    assert f"{engine.pid}" in run_command("wake", "--pid", str(engine.pid), "--url", exporter.url).stdout
    assert node.books().used_by(engine.pid) == before


def test_an_engine_with_requests_is_left_alone_until_it_has_none(
    node: EmulatedNode, engine: Engine, act: Callable[..., Any], exporter: ExporterProcess
) -> None:
    engine.set_requests(2)
    before = node.books().used_by(engine.pid)
    assert act("release_memory")["reason_code"] == "engine_busy"
    request: dict[str, Any] = {"target": {"pid": engine.pid}, "wait_idle_seconds": 120, "wait_seconds": 0}
    cancelled, waiting = (
        f"/api/v1/actions/{exporter.act('release_memory', expect=202, **request)['id']}" for _ in range(2)
    )
    exporter.request("DELETE", cancelled)
    wait_for(lambda: exporter.get(cancelled)["state"] == "cancelled", "the end of the wait")
    assert node.books().used_by(engine.pid) == before
    engine.set_requests(0)
    wait_for(lambda: exporter.get(waiting)["state"] == "done", "the engine to sleep")
    assert node.books().used_by(engine.pid) == before - CACHE - WEIGHTS
    events = [event for event in exporter.events(type="action") if event["detail"]["action"] == "release_memory"]
    assert [event["detail"]["freed_bytes"] for event in events][-1] == CACHE + WEIGHTS
    act("resume_memory")
    engine.set_requests(1)
    assert act("release_memory", force=True)["freed_bytes"] == CACHE + WEIGHTS


@needs_root
def test_another_user_reaches_no_engine_of_root(
    node: EmulatedNode, engine: Engine, start_exporter: StartExporter, exporter: ExporterProcess
) -> None:
    before = node.books().used_by(engine.pid)
    eve = LocalUser(1002)
    try:
        for action in ("release_memory", "resume_memory"):
            document = {"action": action, "target": {"pid": engine.pid}, "force": True}
            assert eve.request(exporter.tcp_url, "POST", "/api/v1/actions", document).status == 403
    finally:
        eve.close()
    assert node.books().used_by(engine.pid) == before
    cautious = start_exporter(node, *QUICK)  # by default, neither is allowed
    assert "--action.allow" in str(cautious.act("release_memory", target={"all": True}, expect=403))


STARTING = "VLLM::EngineCore"
HOARD = 2048 * MIB
"""More than the engine holds when it measures, as in the field: otherwise its start does not fail."""

STARTING_ENGINE = """
wait()
_, initial, _ = memory()
say("snapshot")
wait()
malloc(256 << 20)
_, activations = malloc(64 << 20)
free(activations)
_, available, _ = memory()
assert initial >= available, f"Error in memory profiling. Initial {initial}, current {available} bytes are free"
malloc(available // 2)
say("serves")
wait()
"""
"""As vLLM's worker: init_device, load_model, determine_available_memory, initialize_from_config."""


@contextmanager
def starting(node: EmulatedNode, exporter: ExporterProcess) -> Iterator[Program]:
    """Start an engine that has looked at the free memory, and that the exporter shows; it goes on at `go()`."""
    with Program(
        node, STARTING_ENGINE, environment={"PYTHONHOME": sys.base_prefix}, launcher=titled(STARTING)
    ) as engine:
        engine.go()
        assert engine.heard() == "snapshot"
        listed = "/api/v1/processes"
        wait_for(lambda: engine.pid in [each["pid"] for each in exporter.get(listed)["processes"]], "the engine")
        yield engine


def test_a_clear_waits_for_the_engine_and_a_forced_one_ends_its_start(
    node: EmulatedNode, exporter: ExporterProcess, start_torch: StartTorch
) -> None:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="hoard")
    process.call("free", numbers=[process.call("alloc", nbytes=HOARD)])
    exporter.wait_for_processes(process.pid)
    before = node.books().used_by(process.pid)
    clear = ("clear", "--pid", str(process.pid), "--url", exporter.url)
    with starting(node, exporter) as engine:
        dry = run_command(*clear, "--dry-run", "--json")
        assert [(each["outcome"], each["reason_code"]) for each in json.loads(dry.stdout)["results"]] == [
            ("refused", "engine_starting")
        ]
        refused = run_command(*clear, "--deadline", "4")  # the first reply may take three
        assert refused.returncode == 1
        assert f"pid {engine.pid} ({STARTING})" in refused.stderr
        for name in (str(engine.pid), STARTING, "GPU 0", "--force"):
            assert name in refused.stdout
        request = {"target": {"pid": process.pid}, "wait_seconds": 0, "deadline_seconds": patient(120)}
        document = exporter.act("empty_cache", expect=202, **request)
        (wait,) = document["waits_for"]
        assert (wait["pid"], wait["title"], wait["gpu"]) == (engine.pid, STARTING, "0")
        engine.go()
        assert engine.heard() == "serves"
        path = f"/api/v1/actions/{document['id']}"
        assert exporter.get(path)["state"] == "queued"
        assert node.books().used_by(process.pid) == before
        engine.go()
        assert engine.finish() == 0
    wait_for(lambda: exporter.get(path)["state"] == "done", "the clear after the engine")
    assert node.books().used_by(process.pid) == before - HOARD
    assert exporter.get(path)["waits_for"] == []

    process.call("free", numbers=[process.call("alloc", nbytes=HOARD)])
    with starting(node, exporter) as engine:
        assert run_command(*clear, "--force").returncode == 0
        assert node.books().used_by(process.pid) == before - HOARD
        engine.go()
        assert engine.finish() == 1
        assert "Error in memory profiling" in engine.stderr()
