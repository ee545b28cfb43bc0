"""The live page in a real Chromium, with checks for errors of the browser."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, sync_playwright

from tests.support.waiting import patient

NBSP = "\u00a0"

_WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (e) => violations.push(`${e.violatedDirective} ${e.blockedURI}`));
"""

OpenPage = Callable[..., "LivePage"]


class Served(Protocol):
    """A real exporter, or another server that has its page."""

    @property
    def tcp_url(self) -> str:
        """The URL of the page, without the slash at its end."""


class LivePage:
    """One open page. Messages of the browser are collected, and fail the test at its end.

    `expects` has texts of allowed messages; a page that lost its exporter has some.
    """

    def __init__(self, page: Page, url: str, expects: tuple[str, ...]) -> None:
        self.page = page
        self.url = url
        self.requested: list[str] = []
        self._expects = expects
        self._complaints: list[str] = []
        page.set_default_timeout(patient(30_000))
        page.on("console", lambda message: self._complaints.append(message.text) if message.type != "log" else None)
        page.on("pageerror", lambda error: self._complaints.append(str(error)))
        page.on("request", lambda request: self.requested.append(request.url))
        page.add_init_script(_WATCH)

    def goto(self) -> None:
        """Load the page and wait until it shows a state."""
        self.page.goto(self.url)
        self.page.locator("#moment", has_text=":").wait_for()

    def until(self, condition: str, argument: Any = None) -> None:
        """Wait until a JavaScript expression, which may use `it` for the argument, is true."""
        deadline = time.monotonic() + patient(30)
        while not self.page.evaluate(f"(it) => Boolean({condition})", argument):
            assert time.monotonic() < deadline, f"waited for {condition} ({argument}):\n{self.text('body')}"
            self.page.wait_for_timeout(20)

    def pass_second(self) -> None:
        """Let one second of the page's time pass, and wait for the refresh in it; with `now` of `open_page` only."""
        before, deadline = self.text("#moment"), time.monotonic() + patient(30)
        while self.text("#moment") == before:
            assert time.monotonic() < deadline, f"the page stays at {before}:\n{self.text('body')}"
            # Again if the poll of the second before was still on its way: the page then polls no second time, and what
            # it receives is the state before this second.
            self.page.clock.run_for(1000)
            until = time.monotonic() + 1.0
            while self.text("#moment") == before and time.monotonic() < until:
                self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        """Return the visible text of an element, with plain spaces."""
        return self.page.locator(selector).first.inner_text().replace(NBSP, " ")

    def violations_of_access(self) -> list[str]:
        """Return axe's violations of accessibility rules by element."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['target']} {node.get('failureSummary')}" for rule in found for node in rule["nodes"]
        ]

    def assert_clean(self) -> None:
        """Assert that there were no unexpected messages, no requests to other hosts, and no policy violations."""
        unexpected = [text for text in self._complaints if not any(expected in text for expected in self._expects)]
        assert unexpected == [], unexpected
        origin = urlsplit(self.url)[:2]
        outside = [url for url in self.requested if not url.startswith("data:") and urlsplit(url)[:2] != origin]
        assert outside == []
        assert self.page.evaluate("violations") == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Start Chromium for a module; not for the session, because Playwright blocks other event loops of the thread."""
    executable = shutil.which("chromium")
    assert executable, "chromium is not on PATH: run the tests by `sh tests/run.sh`, which brings it"
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(
            executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        yield launched
        launched.close()


@pytest.fixture
def open_page(browser: Browser) -> Iterator[OpenPage]:
    """Return a function that opens a page: `open_page(exporter, path="", expects=(), script="")`.

    `script` runs before the page's script; `now`, in Unix seconds, stops the
    page's time, which then passes in `pass_second`. The other options are of the context.
    """
    opened: list[LivePage] = []

    def open_(
        exporter: Served,
        *,
        path: str = "",
        expects: tuple[str, ...] = (),
        script: str = "",
        now: float | None = None,
        **options: Any,
    ) -> LivePage:
        live = LivePage(browser.new_context(**options).new_page(), f"{exporter.tcp_url}/{path}", expects)
        opened.append(live)
        if now is not None:
            live.page.clock.install(time=now)
            live.page.clock.pause_at(now + 1)
        if script:
            live.page.add_init_script(script)
        live.goto()
        return live

    yield open_
    try:
        for live in opened:
            live.assert_clean()
    finally:
        for live in opened:
            live.page.context.close()
