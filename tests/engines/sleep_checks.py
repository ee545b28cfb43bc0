"""A real `vllm serve` on the emulated node sleeps and wakes by the exporter's actions."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.conftest import StartExporter
from tests.emulation.node import MIB, EmulatedNode
from tests.engines.conftest import StartVllm
from tests.engines.servers import START_SECONDS, TITLE, Vllm
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.running_command import run_command
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK, "--action.allow", "default,release_memory,resume_memory")


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
    finally:
        vllm.close()
