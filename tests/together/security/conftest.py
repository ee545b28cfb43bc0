"""The users of a module's shared node, and the two ways to its exporter."""

from __future__ import annotations

import pytest

from tests.support.processes.local_users import ADA, EVE, LocalUser, SharedNode


@pytest.fixture(scope="module")
def root(node: SharedNode) -> LocalUser:
    return node.user(0)


@pytest.fixture(scope="module")
def ada(node: SharedNode) -> LocalUser:
    return node.user(ADA, workload="ada")


@pytest.fixture(scope="module")
def eve(node: SharedNode) -> LocalUser:
    return node.user(EVE)


@pytest.fixture(params=["socket", "loopback"])
def url(request: pytest.FixtureRequest, node: SharedNode) -> str:
    return node.url if request.param == "socket" else node.tcp
