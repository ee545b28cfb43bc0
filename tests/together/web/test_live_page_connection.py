"""The live page's connection: streaming, polling, and a lost exporter."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.live_page import Demo, LivePage, OpenPage, browser, open_page, serving

__all__ = ["browser", "open_page"]

LOST = ("ERR_", "Failed to load resource")


def assert_lost(live: LivePage) -> None:
    live.page.locator("#lost").wait_for()
    assert re.search(r"\b\d\d:\d\d:\d\d\b", live.text("#lost"))  # the time of the last reply
    assert live.page.locator("#lost").get_attribute("role") == "alert"
    assert live.text("#mode") == "lost"
    # Visible text; events have their own times.
    shown = live.page.locator("main").inner_text().replace(live.page.locator("#events").inner_text(), "")
    assert re.findall(r"\d\sGiB|\d\s%|demo-", shown) == []
    assert "Devices" in shown
    assert live.page.locator("#rows button:visible, .device button:visible").count() == 0
    assert live.page.locator("#clear-all").is_disabled()


def assert_live(live: LivePage) -> None:
    live.until("document.body.dataset.mode === 'live'")
    assert not live.page.locator("#lost").is_visible()
    assert live.page.locator(".device .amounts").first.is_visible()


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Demo]:
    """A demo that a test may stop and start again."""
    with serving(tmp_path_factory.mktemp("own"), "--demo") as running:
        yield running


def test_a_killed_exporter_is_shown_as_lost_and_reconnected(own: Demo, open_page: OpenPage) -> None:
    exporter, url = own
    live = open_page(url, expects=LOST)
    assert_live(live)
    exporter.stop(signal.SIGKILL)
    assert_lost(live)
    assert live.violations_of_access() == []
    exporter.start()
    assert_live(live)
    live.until("document.querySelectorAll('.device').length === 8")


def test_the_exporter_stops_while_pages_are_open(own: Demo, open_page: OpenPage) -> None:
    exporter, url = own
    lives = [open_page(url, expects=LOST) for _ in range(2)]
    for live in lives:
        assert_live(live)
    assert exporter.stop(signal.SIGTERM) == 0
    assert re.search("Traceback|level=error", exporter.log()) is None, exporter.log()
    for live in lives:
        assert_lost(live)
    exporter.start()


def test_a_stopped_exporter_is_shown_as_lost(own: Demo, open_page: OpenPage) -> None:
    exporter, url = own
    live = open_page(url, expects=LOST)
    assert_live(live)
    # Simulate a minute without replies: the page's clock is ahead, and its requests time out.
    live.page.evaluate("() => { const now = Date.now; Date.now = () => now() + (window.ahead ?? 0); }")
    exporter.signal(signal.SIGSTOP)
    live.page.evaluate("() => { window.ahead = 60_000; AbortSignal.timeout = () => AbortSignal.abort(); }")
    live.page.locator("#lost").wait_for()
    exporter.signal(signal.SIGCONT)


def test_the_page_polls_without_server_sent_events(demo: Demo, open_page: OpenPage) -> None:
    _, url = demo
    live = open_page(url, script="delete window.EventSource")
    assert re.match(r"polling\b.*\b2 s", live.text("#mode"))
    first = live.text("#moment")
    live.until("document.querySelector('#moment').textContent !== it", first)
    assert live.page.evaluate("document.body.dataset.mode") == "polling"


def test_the_page_polls_if_the_stream_fails_and_tries_it_later(demo: Demo, open_page: OpenPage) -> None:
    _, url = demo
    script = """
        const Real = EventSource;
        window.refusing = true;
        window.EventSource = function (path) { return new Real(window.refusing ? '/refused' : path); };
    """
    live = open_page(url, expects=("status of 404", "EventSource's response"), script=script)
    live.until("document.body.dataset.mode === 'polling'")
    live.page.evaluate("window.refusing = false")
    assert_live(live)


def test_a_hidden_page_disconnects_and_shows_no_old_values_when_it_is_visible_again(
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
    assert_live(live)
    live.page.evaluate("turnAway(true)")
    assert live.page.evaluate("streams.map((stream) => stream.readyState)") == [2]
    requested = len(live.requested)
    # Simulate the passing of five minutes.
    live.page.evaluate("() => { const now = Date.now; Date.now = () => now() + 300_000; }")
    mode, shown, of_events = live.page.evaluate(
        "() => { turnAway(false); return [document.body.dataset.mode, main.innerText, events.innerText]; }"
    )
    assert mode == "waiting"
    assert "GiB" not in shown.replace(of_events, "")
    assert_live(live)
    assert sum("/api/v1/live" in url for url in live.requested[requested:]) == 1
