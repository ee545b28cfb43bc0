"""The live page of the demo's node: its layout, the keyboard, accessibility, and a path prefix."""

from __future__ import annotations

from urllib.parse import urlsplit

import pytest

from tests.support.processes.live_page import LivePage, OpenPage, browser, open_page
from tests.support.servers.http_servers import prefix_proxy
from tests.support.servers.still_demo import StillDemo

__all__ = ["browser", "open_page"]

SMALL = """[...document.querySelectorAll('a, button, input, select')]
    .filter((each) => each.offsetParent !== null && !each.matches('.skip'))
    .filter((each) => Math.min(each.getBoundingClientRect().width, each.getBoundingClientRect().height) < 32)
    .map((each) => each.outerHTML)"""
"""The targets that a finger misses."""
MOST_TABS = 80
FOCUS_IS_VISIBLE = """(() => {
    const focused = document.activeElement, style = getComputedStyle(focused), box = focused.getBoundingClientRect();
    const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    return outlined && box.width > 0 && box.bottom > 0 && box.top < innerHeight;
})()"""
SECONDS = 65
"""Jobs are sorted again once a minute."""
ROWS = """[...document.querySelectorAll('#jobs tbody')]
    .map((row) => `${row.querySelector('.name').textContent} ${row.dataset.ended}`).sort().join()"""
SHIFTS = """
window.shifted = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) if (!entry.hadRecentInput) shifted += entry.value;
}).observe({type: 'layout-shift', buffered: true});
"""


def tab_to(live: LivePage, selector: str, key: str = "Tab") -> None:
    """Press a key until an element has the focus; the focus is visible on the way."""
    for _ in range(MOST_TABS):
        live.page.keyboard.press(key)
        assert live.page.evaluate(FOCUS_IS_VISIBLE), live.page.evaluate("document.activeElement.outerHTML")
        if live.page.evaluate("(it) => document.activeElement.matches(it)", selector):
            return
    raise AssertionError(f"{MOST_TABS} times {key} do not reach {selector}")


def focused(live: LivePage, selector: str) -> None:
    """Wait until an element has the focus."""
    live.until("document.activeElement.matches(it)", selector)


def test_on_a_phone_no_job_is_further_than_one_screen(still: StillDemo, open_page: OpenPage) -> None:
    live = open_page(still, viewport={"width": 390, "height": 844})
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


def test_a_job_has_the_color_that_the_exporter_assigns_on_every_screen_and_after_a_reload(
    still: StillDemo, open_page: OpenPage
) -> None:
    shown = (
        "[...document.querySelectorAll('#jobs a.name')].map((link) => `${link.textContent} ${link.dataset.hue}`).sort()"
    )
    live = open_page(still)
    colors = []
    for _ in range(10):
        live.goto()
        live.until("document.querySelectorAll('#jobs .job').length >= 10")
        colors.append(live.page.evaluate(shown))
    assert all(each == colors[0] for each in colors)
    jobs = live.page.evaluate("fetch('api/v1/live').then((reply) => reply.json())")["jobs"]
    assert colors[0] == sorted(f"{job['name']} {job['hue']}" for job in jobs)
    live.page.locator("#jobs a.name").first.click()
    title = "document.querySelector('#detail-title')"
    live.until(f"{title}?.dataset.hue")
    assert live.page.evaluate(f"`${{{title}.textContent}} ${{{title}.dataset.hue}}`") in colors[0]


def test_the_memory_of_a_device_adds_up_in_words_and_to_the_byte(still: StillDemo, open_page: OpenPage) -> None:
    live = open_page(still, path="?gpu=7")
    live.until("document.querySelector('#detail details dd')")
    device = live.page.evaluate("fetch('api/v1/live').then((reply) => reply.json())")["devices"][7]
    memory = "#detail section:has(> details)"
    amounts = "(it) => [...document.querySelectorAll(it)].map((each) => each.%s)"
    parts = live.page.evaluate(amounts % "dataset.bytes", f"{memory} > .bar > *")
    exact = live.page.evaluate(amounts % "textContent", f"{memory} details dd:not(.faint)")
    assert len(parts) == 5
    assert sum(map(int, parts)) == device["memory"]["total_bytes"]
    assert [int(each.replace(",", "")) for each in exact] == list(device["ledger"].values())


def test_a_job_that_grows_is_explained_by_a_button(still: StillDemo, open_page: OpenPage) -> None:
    live = open_page(still)
    live.page.get_by_role("button", name="What holds the memory of demo-rag-indexer-leak").click()
    live.until("document.querySelector('#dialog form.profile')")
    assert live.text("#dialog-title") == "Memory profile of demo-rag-indexer-leak"


def test_everything_is_reached_with_the_keyboard(still: StillDemo, open_page: OpenPage) -> None:
    live = open_page(still, viewport={"width": 1440, "height": 900})
    press, shown = live.page.keyboard.press, "#jobs tbody:not([hidden])"
    press("Tab")
    press("Enter")  # on the link to the jobs
    focused(live, "#jobs-title")

    tab_to(live, "#filter")
    live.page.keyboard.type("demo-llm-pretrain")
    live.until("document.querySelectorAll(it).length === 1", shown)
    focused(live, "#filter")
    tab_to(live, "[data-column=allocated] button")
    press("Enter")
    live.until("document.querySelector('[data-column=allocated]').getAttribute('aria-sort') === 'descending'")
    focused(live, "[data-column=allocated] button")
    assert "sort=-allocated" in live.page.url

    tab_to(live, f"{shown} .fold")
    press("Enter")
    live.until("document.querySelectorAll(it).length === 4", f"{shown} .rank")
    focused(live, f"{shown} .fold")
    tab_to(live, "#filter", "Shift+Tab")
    press("Control+A")
    live.page.keyboard.type("demo-pipeline")
    live.until("document.querySelector(it).textContent.startsWith('demo-pipeline')", shown)
    tab_to(live, f"{shown} .act")
    press("Enter")
    focused(live, "#dialog-confirm")
    assert live.page.evaluate(FOCUS_IS_VISIBLE)
    press("Tab")
    press("Tab")
    assert live.page.evaluate("document.querySelector('#dialog').contains(document.activeElement)")
    press("Escape")
    focused(live, f"{shown} .act")
    assert not live.page.locator("#dialog").is_visible()

    tab_to(live, f"{shown} a.name", "Shift+Tab")
    press("Enter")
    focused(live, "#detail-title")
    tab_to(live, "[data-range='1h']")
    press("Enter")
    live.until("document.querySelector(\"[data-range='1h']\").getAttribute('aria-pressed') === 'true'")
    live.until("document.querySelector('.plot canvas')")
    focused(live, "[data-range='1h']")
    tab_to(live, "[aria-label='Zoom in']")
    press("Enter")
    live.until("new URLSearchParams(location.search).has('from')")
    focused(live, "[aria-label='Zoom in']")
    tab_to(live, ".processes .fold[aria-expanded=false]")
    press("Enter")
    focused(live, ".processes .fold[aria-expanded=true]")
    tab_to(live, ".back", "Shift+Tab")
    press("Enter")
    focused(live, f"{shown} a.name")
    assert "q=demo-pipeline" in live.page.url


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_view_is_accessible(still: StillDemo, open_page: OpenPage, scheme: str) -> None:
    live = open_page(still, viewport={"width": 1440, "height": 900}, color_scheme=scheme)
    live.until(
        "document.querySelectorAll('#jobs .job').length >= 10 && document.querySelectorAll('#events li').length > 2"
    )
    live.page.locator("#jobs .fold:visible").first.click()
    assert live.violations_of_access() == []
    live.page.locator("#jobs a.name:has-text('demo-pipeline')").click()
    live.until("document.querySelector('.plot canvas')")
    assert live.violations_of_access() == []
    live.page.locator("#detail").get_by_role("button", name="Clear…").click()
    focused(live, "#dialog-confirm")
    assert live.violations_of_access() == []
    live.page.keyboard.press("Escape")
    live.page.locator(".back").click()
    live.page.locator("#devices a").nth(4).click()
    live.until("document.querySelector('.jobs-of-device li') && document.querySelector('.plot canvas')")
    assert live.violations_of_access() == []


def test_the_page_works_below_a_path_prefix(still: StillDemo, open_page: OpenPage) -> None:
    with prefix_proxy(still.tcp_url, "/gpumem") as proxy:
        live = open_page(proxy, expects=("status of 403",))  # of events and of the clear
        live.page.locator("#jobs a.name:has-text('demo-pipeline-finetune')").click()
        live.until("document.querySelector('.plot canvas')")
        live.page.reload()
        live.until("document.querySelector('#detail-title')?.textContent === 'demo-pipeline-finetune'")
        live.page.locator("#detail .act", has_text="Clear").click()
        live.until("document.querySelector('#dialog-error').textContent.includes('--action.token-file')")
        assert not live.page.locator("#dialog-confirm").is_visible()
        live.page.keyboard.press("Escape")
        live.page.locator("#host").click()
        live.until("!document.querySelector('#node').hidden")
        assert live.page.url == f"{proxy.tcp_url}/"
        for link in live.page.locator("footer nav a").all():
            address = link.evaluate("(it) => it.href")
            assert live.page.request.get(address).status in (200, 403), address
        outside = [url for url in live.requested if not urlsplit(url).path.startswith("/gpumem/")]
        assert [url for url in outside if not url.startswith("data:")] == []


def test_every_job_of_the_demo_is_above_the_fold_and_nothing_moves_in_a_minute(
    still: StillDemo, open_page: OpenPage
) -> None:
    still.advance(60)  # in the next minute a job ends, another one starts, and a device is full now and then
    live = open_page(still, viewport={"width": 1440, "height": 900}, script=SHIFTS, now=still.wall_clock())
    live.until("document.querySelectorAll('#jobs .job').length >= 10")
    bottoms = live.page.evaluate(
        "[...document.querySelectorAll('#jobs .job')].map((row) => row.getBoundingClientRect().bottom)"
    )
    assert max(bottoms) <= 900
    events, rows = set(), set()
    for _ in range(SECONDS):
        events.add(live.text("#events"))
        rows.add(live.page.evaluate(ROWS))
        still.advance(1)
        live.pass_second()
    assert min(len(events), len(rows)) > 1  # there were new events, and a job started or ended
    assert live.page.evaluate("shifted") < 0.01
