"""Skips what needs a real device where there is none, and runs PyTorch processes on the machine as it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess
from tests.gpu.driver import why_no_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip with the reason, found out once and only where such a test was asked for."""
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = why_no_device() if wanting else ""
    if reason:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def start_torch() -> Iterator[StartTorch]:
    """Starts PyTorch processes on the real devices, and reaps them after the test: `start_torch(NAME="value")`."""
    processes: list[TorchProcess] = []

    def start(launcher: tuple[str, ...] = (), **environment: Any) -> TorchProcess:
        processes.append(TorchProcess(None, environment, launcher))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
