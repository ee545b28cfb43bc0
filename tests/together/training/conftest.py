"""What the tests of the toolkit share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.emulation.torch_process import TorchProcess


@pytest.fixture(scope="module")
def process() -> Iterator[TorchProcess]:
    """A process without a driver."""
    with TorchProcess(None, {"OMP_NUM_THREADS": "1"}) as started:
        yield started
