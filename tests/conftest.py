"""Fixtures that any test may ask for; how tests are spread over workers, and their limits."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.emulation.fixtures import emulation, make_node, node, start_torch
from tests.emulation.node import EmulatedNode
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import patient

# Otherwise gRPC starts threads in every fork of a worker that has imported it, and a process with a second thread gets
# no user namespace.
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "false"
# A shell ignores SIGINT in what it starts in the background. Tests of Ctrl-C need Python's handler.
signal.signal(signal.SIGINT, signal.default_int_handler)

__all__ = ["emulation", "make_node", "node", "start_exporter", "start_torch"]

# A slow machine is no failure.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

StartExporter = Callable[..., ExporterProcess]

OF_MODULES = ("tests/exporter", "tests/client", "tests/toolkit")
TIMEOUT_SECONDS = 300.0
"""After which a test without a mark of its own is taken to hang."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give every test a timeout, and start with the tests that take long, so that workers end together.

    Runs after pytest-randomly, whose order is kept among the units and among the others.
    """
    for item in items:
        marked = item.get_closest_marker("timeout")
        seconds = marked.args[0] if marked else TIMEOUT_SECONDS
        item.add_marker(pytest.mark.timeout(patient(seconds)), append=False)
    items.sort(key=lambda item: item.nodeid.startswith(OF_MODULES))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Measure the coverage of the tests of modules only: others simulate hours, which takes three times their CPU."""
    coverage = sys.modules["coverage"].Coverage.current() if "coverage" in sys.modules else None
    if coverage is None or (item.nodeid.startswith(OF_MODULES) and item.get_closest_marker("tools") is None):
        return (yield)
    coverage.stop()
    try:
        return (yield)
    finally:
        coverage.start()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test that is a coroutine function in an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    given = {name: pyfuncitem.funcargs[name] for name in inspect.signature(pyfuncitem.obj).parameters}
    asyncio.run(asyncio.wait_for(pyfuncitem.obj(**given), patient(60)))
    return True


@pytest.fixture
def start_exporter(tmp_path: Path) -> Iterator[StartExporter]:
    """Starts exporters, on an emulated node where one is given: `start_exporter(node, "--report.interval", "0.2")`."""
    exporters: list[ExporterProcess] = []

    def start(on: EmulatedNode | None = None, *flags: str, **options: Any) -> ExporterProcess:
        folder = tmp_path / f"exporter{len(exporters)}"
        folder.mkdir()
        if on is not None:
            options["environment"] = {**on.environment(), **options.get("environment", {})}
        exporters.append(ExporterProcess(folder, *flags, **options))
        return exporters[-1]

    yield start
    for exporter in exporters:
        print(exporter.log())  # pytest shows it where the test failed
        exporter.close()
