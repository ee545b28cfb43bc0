"""A real `vllm serve` on an emulated node, beside a process whose idle cache is cleared while vLLM starts.

vLLM stops where it asks for the first time for the device's address of pinned memory: right after its look at the free
memory, before it loads the model.
"""

from __future__ import annotations

import http.client
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.emulation.node import GIB, EmulatedNode, Rule
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.paths import REPOSITORY
from tests.support.ports import free_port
from tests.support.waiting import patient, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

HERE = REPOSITORY / "tests" / "engines"
TITLE = "VLLM::EngineCore"
CACHE = 6 * GIB
START_SECONDS = 400.0
"""Most of it is the import of vLLM by two processes."""
AFTER_THE_LOOK = "cudaHostGetDevicePointer"
MEMORY_PROFILING = "Error in memory profiling"
"""Of vLLM's own assertion."""


class Vllm:
    """`vllm serve` with random weights of a tiny model."""

    def __init__(self, node: EmulatedNode, folder: Path, launcher: Sequence[str], **environment: str) -> None:
        self.port = free_port()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - lives as long as the process
        self._popen = subprocess.Popen(
            [
                *launcher,
                *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(HERE / "model")),
                *("--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--max-model-len", "256"),
                *("--gpu-memory-utilization", "0.2", "--host", "127.0.0.1", "--port", str(self.port)),
            ],
            env=node.environment(
                HOME=str(folder),
                HF_HUB_OFFLINE="1",
                PYTHONPATH=f"{HERE / 'plugin'}:{REPOSITORY}",
                VLLM_CACHE_ROOT=str(folder / "cache"),
                VLLM_NO_USAGE_STATS="1",
                VLLM_USE_FLASHINFER_SAMPLER="0",
                VLLM_WORKER_MULTIPROC_METHOD="spawn",
                **environment,
            ),
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    def log(self) -> str:
        fd = self._log.fileno()
        return os.pread(fd, os.fstat(fd).st_size, 0).decode(errors="replace")

    def serves(self) -> bool:
        """Return whether it answers requests."""
        assert self._popen.poll() is None, self.log()[-8000:]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health")
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    def ends(self) -> int:
        """Return its exit status."""
        return self._popen.wait(timeout=patient(START_SECONDS))

    def close(self) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self._popen.pid, number)
                self._popen.wait(timeout=30)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue
        self._log.close()


@pytest.fixture
def node(make_node: MakeNode) -> EmulatedNode:
    return make_node(devices=1, total_bytes=16 * GIB)


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


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
    wait_for(vllm.serves, "vLLM", START_SECONDS)
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
