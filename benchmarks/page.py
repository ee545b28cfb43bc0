"""What a refresh of the live page costs: Chromium, the real exporter, its demo with 12 and with 256 processes.

    python -m benchmarks.page [--quick] [--json]

The script's time is the page's own measurement of each refresh, one per second; the second row adds the parsing of the
reply. Both are compared, in turns and in the same page, with a copy of all elements of the page: what a page would at
least do that shows each reply in new elements. The values of every process change all the time. A node on which nothing
changes shows the share of replies without a body. Needs Chromium and the Python package playwright.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, Page, sync_playwright

from benchmarks.claims import Options, Progress, Row, compared, percentile, show, typical
from benchmarks.place import cpu_seconds, cpu_shares
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

PROCESSES = (12, 256)
SCRIPT_RATIO = 5.0

_LISTEN = """
window.seen = {refreshes: [], replies: [], longTasks: []};
new PerformanceObserver((list) => {
  for (const entry of list.getEntriesByName('refresh')) seen.refreshes.push(entry.duration);
}).observe({type: 'measure'});
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) {
    if (entry.name.includes('/api/v1/live')) seen.replies.push([entry.responseStatus, entry.decodedBodySize]);
  }
}).observe({type: 'resource'});
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) seen.longTasks.push(entry.duration);
}).observe({type: 'longtask'});
"""
_FORGET = "for (const all of Object.values(seen)) all.length = 0"
_BESIDE = """async () => {
  const text = await (await fetch('api/v1/live')).text();
  const started = performance.now();
  window.copy = document.querySelector('main').cloneNode(true);
  const copied = performance.now();
  JSON.parse(text);
  return [copied - started, performance.now() - copied];
}"""


def main() -> int:
    os.environ["GPUMEM_TEST_ZYGOTE"] = "0"
    options = Options(__doc__, real_gpu=False)
    options.amount("--seconds", 60.0, 12.0, "seconds of refreshes of each node")
    given = options.read()
    progress = Progress("page", 2 * len(PROCESSES) + 1)
    rows: list[Row] = []
    with _chromium() as browser:
        for count in PROCESSES:
            with _exporter("--demo", "--demo.processes", str(count)) as exporter:
                _wait_for_processes(exporter, 0.8 * count)
                rows += _refreshes(progress, browser, exporter, count, given.seconds)
        progress.part("page of a node on which nothing changes")
        with _exporter(ready="/-/healthy") as exporter:
            page = _opened(browser, exporter, "#no-devices")
            progress.sleep(given.seconds / 4)
            rows += [_unchanged("nothing changes", page.evaluate("seen.replies"))]
    return show("page", rows, as_json=given.json)


def _refreshes(
    progress: Progress, browser: Browser, exporter: ExporterProcess, count: int, seconds: float
) -> Iterator[Row]:
    progress.part(f"{count} processes without a page")
    (before,) = cpu_shares(progress, [exporter.pid], seconds / 4)
    progress.part(f"page of {count} processes")
    page = _opened(browser, exporter, "#jobs .job")
    jobs = page.locator("#jobs .job").count()
    copied: list[float] = []
    parsed: list[float] = []
    used, started = cpu_seconds(exporter.pid), time.monotonic()
    for _ in progress.turns(int(seconds)):
        page.wait_for_timeout(1000)
        times = page.evaluate(_BESIDE)
        copied.append(times[0])
        parsed.append(times[1])
    share = 100 * (cpu_seconds(exporter.pid) - used) / (time.monotonic() - started)
    seen: dict[str, Any] = page.evaluate("seen")
    page.context.close()
    script, beside, base = typical(seen["refreshes"]), f"copying the page of {jobs} jobs", typical(copied)
    name = f"{count} processes"
    yield compared(f"script of a refresh, {name}", script, "ms", beside, base, SCRIPT_RATIO)
    yield compared("the same with the parsing of the reply", script + typical(parsed), "ms", beside, base)
    yield Row("script of a refresh, p95", percentile(seen["refreshes"], 0.95), "ms")
    yield Row("tasks of over 50 ms, layout and paint included", len(seen["longTasks"]), "", f"{len(copied)} seconds")
    yield Row("reply", typical([size for status, size in seen["replies"] if status == 200]) / 1e3, "kB")
    yield _unchanged(name, seen["replies"])
    yield compared("exporter's CPU with one page open", share, "% of a core", "without a page", before)


def _wait_for_processes(exporter: ExporterProcess, at_least: float) -> None:
    wait_for(lambda: len(exporter.processes()) >= at_least, "the reporting processes")


def _unchanged(name: str, replies: list[tuple[int, int]]) -> Row:
    without = sum(status == 304 for status, _ in replies)
    return Row(f"replies without a body, {name}", 100 * without / len(replies), "%", f"{len(replies)} replies")


@contextmanager
def _chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        executable = shutil.which("chromium")
        yield playwright.chromium.launch(executable_path=executable, args=["--no-sandbox", "--disable-dev-shm-usage"])


@contextmanager
def _exporter(*flags: str, ready: str = "/-/ready") -> Iterator[ExporterProcess]:
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as folder,
        closing(ExporterProcess(Path(folder), *flags, ready=ready)) as exporter,
    ):
        yield exporter


def _opened(browser: Browser, exporter: ExporterProcess, shown: str) -> Page:
    """Open the page, and forget what its start cost."""
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.add_init_script(_LISTEN)
    page.goto(exporter.tcp_url)
    page.locator(shown).first.wait_for()
    page.wait_for_timeout(2000)
    page.evaluate(_FORGET)
    return page


if __name__ == "__main__":
    sys.exit(main())
