"""A clear beside an inference engine that starts. The engine measures memory as vLLM does, and fails like it."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.programs import Program
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.running_command import run_command
from tests.support.waiting import patient, wait_for

TITLE = "VLLM::EngineCore"
TITLED = ("bash", "-c", f'exec -a {TITLE} "$0" "$@"')
CACHE = 2048 * MIB
"""More than the engine holds when it measures, as in the field: otherwise its start does not fail."""

ENGINE = """
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


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.fixture
def hoard(start_torch: StartTorch) -> Callable[[ExporterProcess], TorchProcess]:
    """Start a process with idle cache on device 0."""

    def start(exporter: ExporterProcess) -> TorchProcess:
        process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
        process.call("start_client", workload="hoard")
        process.call("free", numbers=[process.call("alloc", nbytes=CACHE)])
        exporter.wait_for_processes(process.pid)
        return process

    return start


@pytest.fixture
def engine(node: EmulatedNode) -> Iterator[Program]:
    """An engine, which waits for `go()` before it looks at the free memory and before it loads."""
    with Program(node, ENGINE, environment={"PYTHONHOME": sys.base_prefix}, launcher=TITLED) as engine:
        yield engine


def begun(engine: Program, exporter: ExporterProcess) -> Program:
    """Let the engine look at the memory, and wait until the exporter shows it."""
    engine.go()
    assert engine.heard() == "snapshot"
    listed = "/api/v1/processes"
    wait_for(lambda: TITLE in [each["command"] for each in exporter.get(listed)["processes"]], "the engine")
    return engine


def serves(engine: Program) -> None:
    engine.go()
    assert engine.heard() == "serves"


def asked(exporter: ExporterProcess, process: TorchProcess, **changes: Any) -> dict[str, Any]:
    """Request a clear of a process without waiting for it."""
    request = {"target": {"pid": process.pid}, "wait_seconds": 0, **changes}
    expect = 200 if changes.get("dry_run") else 202
    document: dict[str, Any] = exporter.act("empty_cache", expect=expect, **request)
    return document


def action(exporter: ExporterProcess, document: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = exporter.get(f"/api/v1/actions/{document['id']}")
    return found


def test_a_clear_waits_for_the_engine_and_then_runs(
    node: EmulatedNode, exporter: ExporterProcess, hoard: Callable[..., TorchProcess], engine: Program
) -> None:
    process = hoard(exporter)
    before = node.books().used_by(process.pid)
    begun(engine, exporter)
    dry = run_command("clear", "--pid", str(process.pid), "--dry-run", "--json", "--url", exporter.url)
    assert [(each["outcome"], each["reason_code"]) for each in json.loads(dry.stdout)["results"]] == [
        ("refused", "engine_starting")
    ]
    document = asked(exporter, process, deadline_seconds=patient(120))
    (wait,) = document["waits_for"]
    assert (wait["pid"], wait["title"], wait["gpu"]) == (engine.pid, TITLE, "0")
    serves(engine)
    assert node.books().used_by(process.pid) == before
    assert action(exporter, document)["state"] == "queued"
    engine.go()
    assert engine.finish() == 0
    wait_for(lambda: action(exporter, document)["state"] == "done", "the clear after the engine")
    assert node.books().used_by(process.pid) == before - CACHE
    assert action(exporter, document)["waits_for"] == []


def test_a_refused_clear_names_the_engine_and_a_forced_one_ends_its_start(
    node: EmulatedNode, exporter: ExporterProcess, hoard: Callable[..., TorchProcess], engine: Program
) -> None:
    process = hoard(exporter)
    before = node.books().used_by(process.pid)
    begun(engine, exporter)
    clear = ("clear", "--pid", str(process.pid), "--url", exporter.url)
    refused = run_command(*clear, "--deadline", "4")  # the first reply may take three
    assert refused.returncode == 1
    assert f"pid {engine.pid} ({TITLE})" in refused.stderr
    for name in (str(engine.pid), TITLE, "GPU 0", "--force"):
        assert name in refused.stdout
    assert node.books().used_by(process.pid) == before
    assert run_command(*clear, "--force").returncode == 0
    assert node.books().used_by(process.pid) == before - CACHE
    engine.go()
    assert engine.finish() == 1
    assert "Error in memory profiling" in engine.stderr()
