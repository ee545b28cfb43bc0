"""Memory profiles on the page of a job: the dialog, its progress, the list, and the pages that its links open."""

from __future__ import annotations

from types import SimpleNamespace

from tests.support.live_page import OpenPage, browser, open_page
from tests.support.made_up_profiles import training
from tests.support.profile_documents import takes
from tests.support.running_exporter import running_exporter
from tests.support.waiting import patient

__all__ = ["browser", "open_page"]


def test_a_profile_is_taken_on_the_page_and_compared_with_the_one_before(open_page: OpenPage) -> None:
    with running_exporter() as exporter:
        thread = takes(exporter, training(leaked=300), training(leaked=900))
        live = open_page(SimpleNamespace(tcp_url=exporter.url), path="?workload=train")
        for choice, words in (("Now", "Take"), ("Record for 30 s", "Take")):
            live.page.get_by_role("button", name="Take a profile").click()
            live.page.get_by_label(choice).check()
            live.page.get_by_role("button", name=f"{words} the profile").click()
            link = live.page.get_by_role("link", name="Open the profile")
            link.wait_for()
            live.page.locator("#dialog-cancel").click()
        thread.join(patient(30))
        assert [kept["recorded_seconds"] for kept in exporter.document("/api/v1/profiles")["profiles"]] == [30, 30]
        assert exporter.document("/api/v1/actions")["actions"][0]["state"] == "done"
        live.until("document.querySelectorAll('.profiles li').length === 2")
        with live.page.context.expect_page() as opened:
            live.page.get_by_role("link", name="what changed").click()
        difference = opened.value
        difference.locator("td", has_text="+600 MiB").first.wait_for()
        # The page cannot use the rights of a viewer of the live page: it has an origin of its own.
        assert difference.evaluate("self.origin") == "null"
        assert difference.locator("g.frame").count() > 0


def test_a_profile_that_was_refused_says_why(open_page: OpenPage) -> None:
    with running_exporter() as exporter:
        takes(exporter)
        live = open_page(SimpleNamespace(tcp_url=exporter.url), path="?workload=train")
        live.page.get_by_role("button", name="Take a profile").click()
        live.page.get_by_role("button", name="Take the profile").click()
        live.page.get_by_role("button", name="Cancel the profile").click()
        live.page.locator("#dialog-error").wait_for()
        assert live.page.locator(".profiles a").count() == 0
