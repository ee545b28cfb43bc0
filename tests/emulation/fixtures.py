"""Fixtures of the emulated node, imported by tests/conftest.py: `emulation`, `make_node`, `node`, `start_torch`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from . import build
from .node import EmulatedNode
from .torch_process import TorchProcess

MakeNode = Callable[..., EmulatedNode]
StartTorch = Callable[..., TorchProcess]


@pytest.fixture(scope="session")
def emulation() -> Path:
    """The folder of the built libraries."""
    return build.built()


@pytest.fixture
def make_node(tmp_path: Path, emulation: Path) -> Iterator[MakeNode]:
    """Create nodes with the arguments of EmulatedNode except `path`, and close them after the test."""
    nodes: list[EmulatedNode] = []

    def make(**options: Any) -> EmulatedNode:
        nodes.append(EmulatedNode(tmp_path / f"node{len(nodes)}", **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


@pytest.fixture
def node(make_node: MakeNode) -> EmulatedNode:
    """A new node with two GPUs of 8 GiB; the driver reserves 479 MiB of each, and a context uses 518 MiB."""
    return make_node()


@pytest.fixture
def start_torch(node: EmulatedNode) -> Iterator[StartTorch]:
    """Start PyTorch processes on `node` or on another node, and end them after the test.

    `start_torch(PYTORCH_CUDA_ALLOC_CONF="…")` adds to the environment; a value of None removes a variable.
    """
    processes: list[TorchProcess] = []

    def start(
        on: EmulatedNode | None = None, launcher: tuple[str, ...] = (), fresh: bool = False, **environment: str | None
    ) -> TorchProcess:
        processes.append(TorchProcess(on or node, environment, launcher, fresh))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
