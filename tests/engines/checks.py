"""A real `vllm serve` on an emulated node, beside a process whose idle cache is cleared while vLLM starts.

vLLM stops where it asks for the first time for the device's address of pinned memory: right after its look at the free
memory, before it loads the model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, EmulatedNode, Rule
from tests.emulation.torch_process import TorchProcess
from tests.engines.servers import START_SECONDS, TITLE, Vllm
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import patient, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CACHE = 6 * GIB
AFTER_THE_LOOK = "cudaHostGetDevicePointer"
MEMORY_PROFILING = "Error in memory profiling"
"""Of vLLM's own assertion."""


@pytest.fixture
def neighbor(exporter: ExporterProcess, start_torch: StartTorch) -> TorchProcess:
    """A process with 6 GiB of idle cache."""
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="neighbor")
    process.call("free", numbers=[process.call("alloc", nbytes=CACHE)])
    exporter.wait_for_processes(process.pid)
    return process


@pytest.fixture
def start(node: EmulatedNode, exporter: ExporterProcess, tmp_path: Path) -> Iterator[Callable[..., tuple[Vllm, Rule]]]:
    """Start vLLM and return it once it has looked at the free memory and the exporter shows it.

    It goes on when the rule is removed.
    """
    started: list[Vllm] = []

    def run(launcher: Sequence[str] = (), **environment: str) -> tuple[Vllm, Rule]:
        rule = node.hang(AFTER_THE_LOOK)
        started.append(Vllm(node, tmp_path, launcher, **environment))
        rule.wait_for_waiting(timeout_seconds=START_SECONDS)
        listed = "/api/v1/processes"
        wait_for(lambda: TITLE in [each["command"] for each in exporter.get(listed)["processes"]], "the engine")
        return started[-1], rule

    yield run
    node.release()
    for vllm in started:
        vllm.close()


def clear(exporter: ExporterProcess, process: TorchProcess, *, expect: int = 200, **changes: Any) -> dict[str, Any]:
    request = {"target": {"pid": process.pid}, **changes}
    document: dict[str, Any] = exporter.act("empty_cache", expect=expect, **request)
    return document


def test_a_clear_waits_until_a_reporting_vllm_has_measured_its_memory(
    node: EmulatedNode, exporter: ExporterProcess, neighbor: TorchProcess, start: Callable[..., tuple[Vllm, Rule]]
) -> None:
    launcher = (sys.executable, "-m", "gpumem_exporter", "run", "--workload", "engine", "--")
    vllm, rule = start(launcher, GPUMEM_EXPORTER_URL=exporter.url)
    before = node.books().used_by(neighbor.pid)
    document = clear(exporter, neighbor, expect=202, wait_seconds=0, deadline_seconds=patient(START_SECONDS))
    (wait,) = document["waits_for"]
    assert (wait["title"], wait["gpu"]) == (TITLE, "0")
    rule.remove()
    vllm.wait()
    wait_for(lambda: exporter.get(f"/api/v1/actions/{document['id']}")["state"] == "done", "the clear")
    assert node.books().used_by(neighbor.pid) == before - CACHE
    assert vllm.serves()


def test_a_clear_with_force_ends_the_start_of_vllm(
    node: EmulatedNode, exporter: ExporterProcess, neighbor: TorchProcess, start: Callable[..., tuple[Vllm, Rule]]
) -> None:
    vllm, rule = start()
    (refused,) = clear(exporter, neighbor, dry_run=True)["results"]
    assert refused["reason_code"] == "engine_starting"
    assert TITLE in refused["reason"]
    (done,) = clear(exporter, neighbor, force=True, wait_seconds=60)["results"]
    assert (done["outcome"], done["freed_bytes"]) == ("done", CACHE)
    rule.remove()
    assert vllm.ends() != 0
    assert MEMORY_PROFILING in vllm.log()
    print(next(line for line in vllm.log().splitlines() if MEMORY_PROFILING in line))
