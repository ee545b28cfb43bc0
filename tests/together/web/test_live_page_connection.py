"""The live page's connection: polling, lost rights, and a lost exporter."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterator

import pytest

from tests.support.exporter_process import ExporterProcess
from tests.support.live_page import LivePage, OpenPage, browser, open_page, serving

__all__ = ["browser", "open_page"]

LOST = ("ERR_", "Failed to load resource")


TICKS = "const every = setInterval; setInterval = (tick, ms) => { window.tick = tick; return every(tick, ms); };"


def polls(live: LivePage) -> bool:
    """Whether the page requests a state when a poll is due."""
    live.page.evaluate("fetch('/health')")  # earlier requests are listed before it
    before = len(live.requested)
    live.page.evaluate("tick(), fetch('/health')")
    return any("/live" in url for url in live.requested[before:])


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
def own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    """A demo that a test may stop and start again."""
    with serving(tmp_path_factory.mktemp("own"), "--demo") as running:
        yield running


def test_a_killed_exporter_is_shown_as_lost_and_reconnected(own: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(own, expects=LOST)
    assert_live(live)
    own.stop(signal.SIGKILL)
    assert_lost(live)
    assert live.violations_of_access() == []
    own.start()
    assert_live(live)
    live.until("document.querySelectorAll('.device').length === 8")


def test_the_exporter_stops_while_pages_are_open(own: ExporterProcess, open_page: OpenPage) -> None:
    lives = [open_page(own, expects=LOST) for _ in range(2)]
    for live in lives:
        assert_live(live)
    assert own.stop(signal.SIGTERM) == 0
    assert re.search("Traceback|level=error", own.log()) is None, own.log()
    for live in lives:
        assert_lost(live)
    own.start()


def test_a_stopped_exporter_is_shown_as_lost(own: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(own, expects=LOST)
    assert_live(live)
    # Simulate a minute without replies: the page's clock is ahead, and its requests time out.
    live.page.evaluate("() => { const now = Date.now; Date.now = () => now() + (window.ahead ?? 0); }")
    own.signal(signal.SIGSTOP)
    live.page.evaluate("() => { window.ahead = 60_000; AbortSignal.timeout = () => AbortSignal.abort(); }")
    live.page.locator("#lost").wait_for()
    own.signal(signal.SIGCONT)


def test_lost_rights_are_shown_and_returned_ones_are_used(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo, expects=("401",), script=TICKS)
    assert_live(live)
    problem = {"status": 401, "detail": "wrong name or password"}
    live.page.route("**/api/v1/live*", lambda route: route.fulfill(status=401, json=problem))
    live.until("document.body.dataset.mode === 'refused'")
    assert "wrong name or password" in live.text("#lost")
    assert live.page.locator(".device .amounts:visible").count() == 0
    assert not polls(live)  # a browser may ask for a password at each
    live.page.unroute("**/api/v1/live*")
    live.page.evaluate("() => { const now = Date.now; Date.now = () => now() + 61_000; }")
    assert_live(live)


def test_an_unchanged_state_is_not_sent_again_and_time_passes(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)
    assert_live(live)
    live.page.route("**/api/v1/live*", lambda route: route.fulfill(status=304))
    first = live.text("#moment")
    live.until("document.querySelector('#moment').textContent !== it", first)
    assert_live(live)


def test_a_poll_requests_only_newer_history(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)
    for _ in range(3):
        with live.page.expect_response(lambda reply: "live?since=" in reply.url) as poll:
            pass
        assert len(poll.value.json()["history"]["seconds"]) <= 2
    known = demo.get("/api/v1/live")["history"]["seconds"]
    path = str(live.page.locator(".chart .in-use").first.get_attribute("d"))
    assert path.count("L") + path.count("M") >= len(known) - 2


def test_a_page_that_was_away_shows_no_old_values(demo: ExporterProcess, open_page: OpenPage) -> None:
    script = """
        Object.defineProperty(document, 'hidden', {get: () => Boolean(window.away)});
        window.turnAway = (away) => { window.away = away; document.dispatchEvent(new Event('visibilitychange')); };
    """
    live = open_page(demo, script=TICKS + script)
    assert_live(live)
    live.page.evaluate("turnAway(true)")
    assert not polls(live)
    # Simulate the passing of five minutes.
    live.page.evaluate("() => { const now = Date.now; Date.now = () => now() + 300_000; }")
    mode, shown, of_events = live.page.evaluate(
        "() => { turnAway(false); return [document.body.dataset.mode, main.innerText, events.innerText]; }"
    )
    assert mode == "waiting"
    assert "GiB" not in shown.replace(of_events, "")
    assert_live(live)
