"""The live page in a real Chromium: opened, watched, and asked whether anything about it was not right."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route, sync_playwright

from gpumem_exporter.wire.protocol import REPORTS_PATH, to_wire
from tests.support.builders import MIB, UUIDS, report, sample
from tests.support.exporter_process import ExporterProcess
from tests.support.ports import free_port
from tests.support.waiting import patient

__all__ = ["Demo", "LivePage", "OpenPage", "browser", "open_page", "send", "serving", "state_of"]

NBSP = "\u00a0"

_WATCH = """
window.violations = [];
document.addEventListener('securitypolicyviolation', (e) => violations.push(`${e.violatedDirective} ${e.blockedURI}`));
"""

OpenPage = Callable[..., "LivePage"]
Demo: TypeAlias = "tuple[ExporterProcess, str]"


class LivePage:
    """One open page. What the browser complains of is kept until the test ends, and is an error then.

    Args:
        page: not yet there.
        url: of the exporter.
        expects: what may stand in the browser's complaints: a page that has lost its exporter has some.
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
        """Load it, and wait until it shows a state."""
        self.page.goto(self.url)
        self.page.locator("#moment", has_text=":").wait_for()

    def until(self, condition: str, argument: Any = None) -> None:
        """Wait until a JavaScript expression, which may use `it` for the argument, is true."""
        deadline = time.monotonic() + patient(30)
        while not self.page.evaluate(f"(it) => Boolean({condition})", argument):
            assert time.monotonic() < deadline, f"waited for {condition} ({argument}):\n{self.text('body')}"
            self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        """What is to be seen there, with plain spaces."""
        return self.page.locator(selector).first.inner_text().replace(NBSP, " ")

    def ledger(self, card: int) -> dict[str, int | None]:
        """The bytes of each part of a card's bar."""
        read = """(card) => Object.fromEntries([...document.querySelectorAll('.device')[card]
            .querySelectorAll('.part')].map((part) => [part.classList[1], part.dataset.bytes]))"""
        parts = self.page.evaluate(read, card)
        return {name: None if value == "unknown" else int(value) for name, value in parts.items()}

    def violations_of_access(self) -> list[str]:
        """What axe finds, by rule and element."""
        found = Axe().run(self.page).response["violations"]
        return [
            f"{rule['id']}: {node['target']} {node.get('failureSummary')}" for rule in found for node in rule["nodes"]
        ]

    def assert_clean(self) -> None:
        """Nothing was complained of, nothing was asked of anybody else, and no policy was violated."""
        assert [text for text in self._complaints if not any(expected in text for expected in self._expects)] == []
        origin = urlsplit(self.url)[:2]
        outside = [url for url in self.requested if not url.startswith("data:") and urlsplit(url)[:2] != origin]
        assert outside == []
        assert self.page.evaluate("violations") == []


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Not for the session: while Playwright is there, no other test of this thread can run an event loop."""
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
    """Opens pages: `open_page(url, expects=(), script="", answer=None, **options of a context)`.

    `script` runs before the page's own; `answer` stands in for the exporter's state.
    """
    opened: list[LivePage] = []

    def open_(
        url: str,
        *,
        expects: tuple[str, ...] = (),
        script: str = "",
        answer: Callable[[], dict[str, Any]] | None = None,
        **options: Any,
    ) -> LivePage:
        live = LivePage(browser.new_context(**options).new_page(), url, expects)
        opened.append(live)
        if script:
            live.page.add_init_script(script)
        if answer is not None:

            def fulfill(route: Route) -> None:
                route.fulfill(body=json.dumps(answer()), content_type="application/json")

            live.page.add_init_script("delete window.EventSource")
            live.page.route("**/api/v1/live", fulfill)
        live.goto()
        return live

    yield open_
    try:
        for live in opened:
            live.assert_clean()
    finally:
        for live in opened:
            live.page.context.close()


@contextlib.contextmanager
def serving(folder: Path, *flags: str, **options: Any) -> Iterator[tuple[ExporterProcess, str]]:
    """A real exporter, and where its page is; the same place again when it is started again."""
    port = free_port()
    exporter = ExporterProcess(folder, "--web.listen-address", f"127.0.0.1:{port}", *flags, **options)
    try:
        yield exporter, f"http://127.0.0.1:{port}/"
    finally:
        print(exporter.log())
        exporter.close()


def state_of(exporter: ExporterProcess) -> dict[str, Any]:
    """What the page is given."""
    document: dict[str, Any] = exporter.get("/api/v1/live")
    return document


def send(
    exporter: ExporterProcess, pid: int, allocated: int, *, reclaimable_known: bool = True, **changes: Any
) -> None:
    """A report of a process of the test's, of which 1 MiB would come back."""
    changes = {"session": f"of {pid}", **changes}
    known = sample(UUIDS[0], allocated, reclaimable=MIB, fragmented=2 * MIB)
    device = known if reclaimable_known else replace(known, reclaimable_bytes=None)
    assert exporter.request("POST", REPORTS_PATH, to_wire(report(pid, devices=(device,), **changes))).status == 200
