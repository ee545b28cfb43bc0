"""The live page: its content and its addresses."""

from __future__ import annotations

from pathlib import Path

from tests.support.builders import MIB
from tests.support.exporter_process import ExporterProcess
from tests.support.live_page import OpenPage, browser, open_page, send, serving

__all__ = ["browser", "open_page"]

SMALL = """[...document.querySelectorAll('a, button, input, select')]
    .filter((each) => each.offsetParent !== null && !each.matches('.skip'))
    .filter((each) => Math.min(each.getBoundingClientRect().width, each.getBoundingClientRect().height) < 32)
    .map((each) => each.outerHTML)"""
"""The targets that a finger misses."""


def test_on_a_phone_no_job_is_further_than_one_screen(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo, viewport={"width": 390, "height": 844})
    live.until("document.querySelectorAll('#jobs .job').length >= 10")
    bottoms = live.page.evaluate(
        "[...document.querySelectorAll('#jobs .job')].map((row) => row.getBoundingClientRect().bottom)"
    )
    assert max(bottoms) <= 2 * 844
    truncated = (
        "[...document.querySelectorAll('#jobs .name')].filter((name) => name.scrollWidth > name.clientWidth).length"
    )
    assert live.page.evaluate(truncated) == 0
    for view in ("", "?gpu=7"):
        live.page.goto(f"{live.url}{view}")
        live.until("document.querySelector(it)", "#detail .jobs-of-device li" if view else "#jobs .job")
        assert live.page.evaluate("document.documentElement.scrollWidth") <= 390
        assert live.page.evaluate(SMALL) == []


def test_filter_order_and_job_are_in_the_url(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)
    live.page.locator("#filter").fill("demo-moe")
    live.until("document.querySelectorAll('#jobs tbody:not([hidden])').length === 1")
    live.page.get_by_role("button", name="Allocated").click()
    assert "q=demo-moe" in live.page.url
    assert "sort=-allocated" in live.page.url
    live.page.locator("#jobs tbody:not([hidden]) a.name").click()
    live.until("document.querySelector('#detail-title')?.textContent === 'demo-moe-finetune'")
    live.until("document.querySelector('.plot canvas')")
    live.page.go_back()
    live.until("!document.querySelector('#node').hidden")


def test_names_are_inserted_as_text(tmp_path: Path, open_page: OpenPage) -> None:
    with serving(tmp_path, "--report.expiry", "3600") as exporter:
        send(exporter, 502, MIB, workload="<img src=x onerror=alert(1)>\u202e")
        live = open_page(exporter)
        live.until("document.querySelector('#jobs').textContent.includes('onerror')")
        assert live.page.evaluate("document.querySelectorAll('body img').length") == 0
        assert live.page.evaluate("document.body.textContent.includes('\\u202e')") is False
