"""The live page and its exporter: how the state comes, and what is shown when none comes."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.live_page import Demo, LivePage, OpenPage, browser, open_page, serving

__all__ = ["browser", "open_page"]

LOST = ("ERR_", "Failed to load resource")


def assert_it_says_that_the_exporter_is_lost(live: LivePage) -> None:
    live.page.locator("#lost").wait_for()
    assert re.search(r"\b\d\d:\d\d:\d\d\b", live.text("#lost"))  # when it was last seen
    assert live.page.locator("#lost").get_attribute("role") == "alert"
    assert live.text("#mode") == "lost"
    # Of what is visible; events have their times with them.
    shown = live.page.locator("main").inner_text().replace(live.page.locator("#events").inner_text(), "")
    assert re.findall(r"\d\sGiB|\d\s%|demo-", shown) == []
    assert "Devices" in shown
    assert live.page.locator("#rows button:visible, .device button:visible").count() == 0
    assert live.page.locator("#clear-all").is_disabled()


def assert_it_is_live(live: LivePage) -> None:
    live.until("document.body.dataset.mode === 'live'")
    assert not live.page.locator("#lost").is_visible()
    assert live.page.locator(".device .amounts").first.is_visible()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo that a test may end; it starts it again."""
    with serving(tmp_path_factory.mktemp("own"), "--demo") as running:
        yield running


def test_a_killed_exporter_is_missed_at_once_and_welcomed_back(own: Demo, open_page: OpenPage) -> None:
    exporter, url = own
    live = open_page(url, expects=LOST)
    assert_it_is_live(live)
    exporter.stop(signal.SIGKILL)
    assert_it_says_that_the_exporter_is_lost(live)
    assert live.violations_of_access() == []
    exporter.start()
    assert_it_is_live(live)
    live.until("document.querySelectorAll('.device').length === 8")


def test_an_exporter_that_is_asked_to_stop_does_not_wait_for_those_who_look(own: Demo, open_page: OpenPage) -> None:
    exporter, url = own
    lives = [open_page(url, expects=LOST) for _ in range(2)]
    for live in lives:
        assert_it_is_live(live)
    assert exporter.stop(signal.SIGTERM) == 0
    assert re.search("Traceback|level=error", exporter.log()) is None, exporter.log()
    for live in lives:
        assert_it_says_that_the_exporter_is_lost(live)
    exporter.start()


def test_an_exporter_that_stands_still_is_missed_though_the_connection_is_there(own: Demo, open_page: OpenPage) -> None:
    exporter, url = own
    live = open_page(url, expects=LOST)
    assert_it_is_live(live)
    # Instead of waiting: the page's clock runs ahead, and what it asks for takes too long.
    live.page.evaluate("() => { const now = Date.now; Date.now = () => now() + (window.ahead ?? 0); }")
    exporter.signal(signal.SIGSTOP)
    live.page.evaluate("() => { window.ahead = 60_000; AbortSignal.timeout = () => AbortSignal.abort(); }")
    live.page.locator("#lost").wait_for()
    exporter.signal(signal.SIGCONT)


def test_without_server_sent_events_it_asks_again_and_again(demo: Demo, open_page: OpenPage) -> None:
    _, url = demo
    live = open_page(url, script="delete window.EventSource")
    assert re.match(r"polling\b.*\b2 s", live.text("#mode"))
    first = live.text("#moment")
    live.until("document.querySelector('#moment').textContent !== it", first)
    assert live.page.evaluate("document.body.dataset.mode") == "polling"


def test_where_the_stream_is_refused_it_asks_again_and_again_and_tries_the_stream_later(
    demo: Demo, open_page: OpenPage
) -> None:
    _, url = demo
    script = """
        const Real = EventSource;
        window.refusing = true;
        window.EventSource = function (path) { return new Real(window.refusing ? '/refused' : path); };
    """
    live = open_page(url, expects=("status of 404", "EventSource's response"), script=script)
    live.until("document.body.dataset.mode === 'polling'")
    live.page.evaluate("window.refusing = false")
    assert_it_is_live(live)


def test_a_page_that_nobody_sees_asks_nothing_and_shows_nothing_old_when_it_is_seen_again(
    demo: Demo, open_page: OpenPage
) -> None:
    _, url = demo
    script = """
        const Real = EventSource;
        window.streams = [];
        window.EventSource = function (path) { streams.push(new Real(path)); return streams.at(-1); };
        Object.defineProperty(document, 'hidden', {get: () => Boolean(window.away)});
        window.turnAway = (away) => { window.away = away; document.dispatchEvent(new Event('visibilitychange')); };
    """
    live = open_page(url, script=script)
    assert_it_is_live(live)
    live.page.evaluate("turnAway(true)")
    assert live.page.evaluate("streams.map((stream) => stream.readyState)") == [2]
    asked = len(live.requested)
    # Instead of waiting: minutes have gone by.
    live.page.evaluate("() => { const now = Date.now; Date.now = () => now() + 300_000; }")
    mode, shown, of_events = live.page.evaluate(
        "() => { turnAway(false); return [document.body.dataset.mode, main.innerText, events.innerText]; }"
    )
    assert mode == "waiting"
    assert "GiB" not in shown.replace(of_events, "")
    assert_it_is_live(live)
    assert sum("/api/v1/live" in url for url in live.requested[asked:]) == 1
