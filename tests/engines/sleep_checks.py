"""A real `vllm serve` on the emulated node sleeps and wakes by the exporter's actions."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.programs import Program
from tests.engines.conftest import StartVllm
from tests.engines.servers import START_SECONDS, TITLE, Vllm
from tests.support.processes.running_command import run_command
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import patient, wait_for

WAIT_SECONDS = 60.0
"""The longest wait that the exporter accepts in a request."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK, "--action.allow", "default,release_memory,resume_memory")


def at_one_time(exporter: ExporterProcess, action: str, pid: int) -> list[tuple[str, str | None]]:
    """Request the same action twice at one time, and return the outcomes and their codes."""

    def act(_: int) -> tuple[str, str | None]:
        (result,) = exporter.act(action, target={"pid": pid}, wait_seconds=WAIT_SECONDS)["results"]
        return result["outcome"], result["reason_code"]

    with ThreadPoolExecutor(2) as threads:
        return sorted(threads.map(act, range(2)))


def outcomes(document: dict[str, Any]) -> list[tuple[str, str | None]]:
    return sorted((result["outcome"], result["reason_code"]) for result in document["results"])


@contextlib.contextmanager
def taking(node: EmulatedNode, exporter: ExporterProcess, *, leaves: int) -> Iterator[None]:
    """Run a process that leaves this many bytes of the device free."""
    free = 16 * GIB - 256 * MIB - node.books()[0].used_bytes
    size = free - leaves - GIB // 2  # its context
    with Program(node, f"say(malloc({size})[0]); wait()", environment={"PYTHONHOME": sys.base_prefix}) as program:
        assert program.heard() == 0
        wait_for(lambda: f'"pid": {program.pid},' in json.dumps(exporter.get("/api/v1/processes")), "the process")
        yield


def test_two_servers_at_one_time(node: EmulatedNode, exporter: ExporterProcess, start_vllm: StartVllm) -> None:
    """Two sleeps at one time, two wakes with room for one, and a wake that waits while a neighbor takes the memory."""
    # Given a size, none of them measures how much memory the other, which starts beside it, leaves for the cache.
    cache = "--kv-cache-memory-bytes", str(2 * GIB)
    servers = [start_vllm("--enable-sleep-mode", *cache) for _ in range(2)]
    for vllm in servers:
        vllm.wait()
    wait_for(lambda: str(exporter.get("/api/v1/processes")).count("release_memory") == 2, "both engines")
    first, second = exporter.processes()
    both: dict[str, Any] = {"target": {"pid": [first, second]}, "wait_seconds": WAIT_SECONDS}
    before = node.books().used_by(first)
    assert at_one_time(exporter, "release_memory", first) == [("done", None), ("refused", "engine_asleep")]
    needed = before - node.books().used_by(first)
    assert needed > GIB
    assert outcomes(exporter.act("release_memory", **{**both, "target": {"pid": second}})) == [("done", None)]
    unmapped = lambda: [each["devices"][0]["unmapped_bytes"] or 0 for each in exporter.processes().values()]  # noqa: E731
    wait_for(lambda: min(unmapped()) > GIB, "both reports of a sleeping engine")

    with taking(node, exporter, leaves=needed * 3 // 2):
        one_of_two = [("done", None), ("refused", "device_memory_short")]
        would = outcomes(exporter.act("resume_memory", dry_run=True, **both))
        assert would == [("refused", "device_memory_short"), ("would_resume", None)]
        assert outcomes(exporter.act("resume_memory", **both)) == one_of_two
    assert [vllm.serves() for vllm in servers] == [True, True]
    wait_for(lambda: min(unmapped()) == 0, "the report of the engine that is awake")
    exporter.act("release_memory", **both)
    wait_for(lambda: min(unmapped()) > GIB, "both reports of a sleeping engine")

    launcher = ("bash", "-c", f'exec -a {TITLE} "$0" "$@"')
    environment = {"PYTHONHOME": sys.base_prefix}
    with Program(node, "malloc(1 << 20); say(1); wait()", environment=environment, launcher=launcher) as starting:
        assert starting.heard() == 1
        wait_for(lambda: str(starting.pid) in str(exporter.get("/api/v1/processes")), "the engine that starts")
        asked = {**both, "target": {"pid": first}, "wait_seconds": 0, "deadline_seconds": patient(60)}
        waiting = exporter.act("resume_memory", expect=202, **asked)
        assert [each["pid"] for each in waiting["waits_for"]] == [starting.pid]
        with taking(node, exporter, leaves=needed // 2):
            starting.kill()
            path = f"/api/v1/actions/{waiting['id']}"
            ended = wait_for(lambda: (found := exporter.get(path))["results"] and found, "the wake to end")
            assert outcomes(ended) == [("refused", "device_memory_short")]
    would = [("would_resume", None)] * 2
    wait_for(lambda: outcomes(exporter.act("resume_memory", dry_run=True, **both)) == would, "the neighbor's end")
    assert outcomes(exporter.act("resume_memory", **both)) == [("done", None)] * 2
    assert [vllm.serves() for vllm in servers] == [True, True]
    assert needed - 64 * MIB < node.books().used_by(first) - (before - needed) <= needed


def test_a_server_sleeps_and_wakes_without_development_mode(
    node: EmulatedNode, exporter: ExporterProcess, start_vllm: StartVllm
) -> None:
    vllm = start_vllm("--enable-sleep-mode")
    wait_for(vllm.serves, "vLLM", START_SECONDS)
    wait_for(lambda: "release_memory" in str(exporter.get("/api/v1/processes")), "the engine in its process")
    (pid,) = exporter.processes()
    before = node.books().used_by(pid)
    slept = run_command("sleep", "--workload", "engine", "--wait-idle", "30", "--json", "--url", exporter.url)
    assert slept.returncode == 0, slept.stdout
    (result,) = json.loads(slept.stdout)["results"]
    after = node.books().used_by(pid)
    assert (result["driver_before_bytes"], result["driver_after_bytes"]) == (before, after)
    assert result["freed_bytes"] == before - after > 1000 * MIB
    woken = run_command("wake", "--workload", "engine", "--json", "--url", exporter.url)
    assert woken.returncode == 0, woken.stdout
    awake = node.books().used_by(pid)
    assert after + 1000 * MIB < awake <= before  # sleeping has also released the idle cache
    assert json.loads(woken.stdout)["results"][0]["driver_after_bytes"] == awake
    assert vllm.serves()


def test_a_server_without_a_reporter_sleeps_and_wakes_through_its_development_routes(
    node: EmulatedNode, exporter: ExporterProcess, tmp_path: Path
) -> None:
    vllm = Vllm(node, tmp_path, (), ("--enable-sleep-mode",), VLLM_SERVER_DEV_MODE="1")
    try:
        wait_for(vllm.serves, "vLLM", START_SECONDS)
        listed = "/api/v1/processes"
        wait_for(lambda: TITLE in [each["command"] for each in exporter.get(listed)["processes"]], "the engine")
        (pid,) = [each["pid"] for each in exporter.get(listed)["processes"] if each["command"] == TITLE]
        before = node.books().used_by(pid)
        slept = run_command("sleep", "--pid", str(pid), "--keep", "weights", "--json", "--url", exporter.url)
        assert slept.returncode == 0, slept.stdout
        assert json.loads(slept.stdout)["freed_bytes"] == before - node.books().used_by(pid) > 1000 * MIB
        again = run_command("sleep", "--pid", str(pid), "--json", "--url", exporter.url)
        assert json.loads(again.stdout)["results"][0]["reason_code"] == "engine_asleep"
        woken = run_command("wake", "--pid", str(pid), "--json", "--url", exporter.url)
        assert woken.returncode == 0, woken.stdout
        assert before - 64 * MIB < node.books().used_by(pid) <= before
        assert at_one_time(exporter, "release_memory", pid) == [("done", None), ("refused", "engine_asleep")]
        assert at_one_time(exporter, "resume_memory", pid) == [("done", None), ("refused", "engine_awake")]
        assert vllm.serves()
    finally:
        vllm.close()
