"""The node that attackers and their victims share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.support.shared_node import SharedNode


@pytest.fixture
def node() -> Iterator[SharedNode]:
    with closing(SharedNode()) as node:
        yield node


@pytest.fixture(params=["socket", "loopback"])
def url(request: pytest.FixtureRequest, node: SharedNode) -> str:
    return node.url if request.param == "socket" else node.tcp
