"""The live page without a mouse, and for a screen reader."""

from __future__ import annotations

import pytest

from tests.support.live_page import LivePage, OpenPage, browser, open_page
from tests.support.still_demo import StillDemo

__all__ = ["browser", "open_page"]

MOST_TABS = 80
FOCUS_IS_VISIBLE = """(() => {
    const focused = document.activeElement, style = getComputedStyle(focused), box = focused.getBoundingClientRect();
    const outlined = style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2;
    return outlined && box.width > 0 && box.bottom > 0 && box.top < innerHeight;
})()"""


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
