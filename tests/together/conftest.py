"""What integration tests share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.claims.place import Place
from tests.emulation.node import EmulatedNode
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

if TYPE_CHECKING:
    from tests.support.servers.running_exporter import RunningExporter
    from tests.support.servers.still_demo import StillDemo


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    """A demo for the tests of a module. A test may clear it, and leaves it running."""
    with closing(ExporterProcess(tmp_path_factory.mktemp("demo"), "--demo")) as exporter:
        wait_for(lambda: len(exporter.processes()) >= 12, "the demo's processes")
        yield exporter
        print(exporter.log())


@pytest.fixture(scope="module")
def still() -> Iterator[StillDemo]:
    """A demo whose time passes only where a test lets it pass, for the tests of a module."""
    from tests.support.servers.still_demo import still_demo  # imports the server

    with still_demo() as demo:
        yield demo


@pytest.fixture(scope="module")
def exporter() -> Iterator[RunningExporter]:
    """An exporter in this process for the tests of a module. Some modules define another one."""
    from tests.support.servers.running_exporter import running_exporter  # imports the server

    with running_exporter() as running:
        yield running


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, emulation: Path) -> Iterator[Place]:
    """An emulated node of two GPUs, an exporter on it, and the processes that the tests of a module share."""
    folder = tmp_path_factory.mktemp("place")
    with EmulatedNode(folder / "node") as node, Place(folder, node) as place:
        yield place
