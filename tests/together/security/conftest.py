"""The two ways to the exporter of a shared node."""

from __future__ import annotations

import pytest

from tests.support.processes.shared_node import SharedNode


@pytest.fixture(params=["socket", "loopback"])
def url(request: pytest.FixtureRequest, node: SharedNode) -> str:
    return node.url if request.param == "socket" else node.tcp
