"""The live page when its exporter is lost and returns."""

from __future__ import annotations

import re
import signal
from pathlib import Path

from tests.support.exporter_process import ExporterProcess
from tests.support.live_page import OpenPage, browser, open_page, serving

__all__ = ["browser", "open_page"]

LOST = ("ERR_", "Failed to load resource")


def test_a_lost_exporter_leaves_its_last_values_with_their_time(tmp_path: Path, open_page: OpenPage) -> None:
    own: ExporterProcess
    with serving(tmp_path, "--demo") as own:
        live = open_page(own, expects=LOST)
        live.until("document.querySelectorAll('#jobs .job').length >= 10")
        own.stop(signal.SIGKILL)
        live.until("document.body.dataset.mode === 'lost'")
        assert re.search(r"as of \d\d:\d\d:\d\d", live.text("#mode"))
        assert "GiB" in live.text("#jobs")
        assert live.page.evaluate("document.querySelector('#main').hasAttribute('data-stale')")
        assert live.page.locator("#jobs .act:enabled").count() == 0
        assert live.violations_of_access() == []
        own.start()
        live.until("document.body.dataset.mode === 'live'")
