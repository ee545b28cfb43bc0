"""Fixtures of the checks with real servers: `node`, `exporter` and `start_vllm`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import MakeNode
from tests.emulation.node import GIB, EmulatedNode
from tests.engines.servers import Vllm
from tests.support.servers.exporter_process import QUICK, ExporterProcess

StartVllm = Callable[..., Vllm]


@pytest.fixture
def node(make_node: MakeNode) -> EmulatedNode:
    return make_node(devices=1, total_bytes=16 * GIB)


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.fixture
def start_vllm(node: EmulatedNode, exporter: ExporterProcess, tmp_path: Path) -> Iterator[StartVllm]:
    """Start `vllm serve` with these options below `run`, as the workload `engine`."""
    started: list[Vllm] = []

    def start(*options: str, **environment: str) -> Vllm:
        launcher = (sys.executable, "-m", "gpumem_exporter", "run", "--workload", "engine", "--")
        started.append(Vllm(node, tmp_path, launcher, options, GPUMEM_EXPORTER_URL=exporter.url, **environment))
        return started[-1]

    yield start
    for vllm in started:
        vllm.close()
