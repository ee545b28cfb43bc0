"""The layout of the live page: what is on the first screen, and that nothing moves while the node changes."""

from __future__ import annotations

from tests.support.live_page import OpenPage, browser, open_page
from tests.support.still_demo import StillDemo

__all__ = ["browser", "open_page"]

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
