"""Skips tests that need a real device if there is none, and starts PyTorch processes on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.torch_process import TorchProcess
from tests.gpu.driver import why_no_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests with the marker `gpu` if there is no device."""
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = why_no_device() if wanting else ""
    if reason:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def start_torch() -> Iterator[StartTorch]:
    """Return a function that starts a PyTorch process on the real devices: `start_torch(NAME="value")`."""
    processes: list[TorchProcess] = []

    def start(launcher: tuple[str, ...] = (), **environment: Any) -> TorchProcess:
        processes.append(TorchProcess(None, environment, launcher))
        return processes[-1]

    yield start
    for process in processes:
        process.close()
