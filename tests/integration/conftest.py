"""What integration tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ExporterProcess, str]]:
    """A demo for the tests of a module, and the address of its page. A test may clear it, and leaves it running."""
    from tests.support.live_page import serving, state_of  # imports Playwright

    with serving(tmp_path_factory.mktemp("demo"), "--demo") as (exporter, url):
        wait_for(lambda: len(exporter.processes()) >= 12, "the demo's processes")
        wait_for(lambda: len(state_of(exporter)["history"]["seconds"]) > 1, "two points of the past")
        yield exporter, url
