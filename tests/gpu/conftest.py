"""Skips tests that need a real device if there is none; processes start on this machine."""

from __future__ import annotations

import pytest

from tests.gpu.driver import why_no_device


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests with the marker `gpu` if there is no device."""
    wanting = [item for item in items if item.get_closest_marker("gpu") is not None]
    reason = why_no_device() if wanting else ""
    if reason:
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture
def node() -> None:
    """No emulated node: `start_torch` starts PyTorch processes on the real devices."""
