"""What a refresh of the live page costs the browser: Chromium, the real exporter, 8 devices with 64 processes on each.

    python -m benchmarks.page [--quick] [--json] [--real-gpu]

The script's time is the page's own measurement of each refresh, one per second. The second row adds the parsing of the
reply. Both are compared, in turns and in the same page, with building a new table of the same number of rows and 16
columns, which the page avoids. The driver's bytes of every process change with every poll. The page gets a simulated
history of ten minutes, so that it draws full lines immediately. Needs Chromium and the Python package playwright.
"""

from __future__ import annotations

import shutil
import sys
import threading
import time
from typing import Any

from playwright.sync_api import Page, sync_playwright

from benchmarks.claims import Options, Progress, Row, compared, percentile, show, typical
from benchmarks.place import Place, cpu_seconds, cpu_shares, resident_bytes
from benchmarks.reporters import HELD_BYTES, Stand, report_for_ever
from tests.support.exporter_process import ExporterProcess
from tests.support.waiting import wait_for

PROCESSES = 64
DEVICES = 8
SCRIPT_RATIO = 3.0

_LISTEN = """
window.seen = {refreshes: [], replies: [], longTasks: []};
window.parsed = 0;
new PerformanceObserver((list) => {
  for (const entry of list.getEntriesByName('refresh')) {
    seen.refreshes.push(entry.duration);
    seen.replies.push(entry.duration + parsed);
  }
}).observe({type: 'measure'});
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) seen.longTasks.push(entry.duration);
}).observe({type: 'longtask'});
const request = fetch;
window.fetch = async (path, options) => {
  const reply = await request(path, options);
  if (!path.startsWith('/api/v1/live') || reply.status !== 200) return reply;
  const text = await reply.text();
  const started = performance.now();
  const live = JSON.parse(text);
  parsed = performance.now() - started;
  if (!path.includes('since')) addPast(live.history);
  return {ok: true, status: 200, headers: reply.headers, json: () => live};
};
function addPast(history) {
  const past = [];
  for (let i = 299; i > 0; i -= 1) past.push(history.seconds[0] - 2 * i);
  history.seconds.unshift(...past);
  for (const line of Object.values(history.devices)) {
    line.in_use.unshift(...past.map((_, i) => 40000 + ((7919 * i) % 20000)));
    line.allocated.unshift(...past.map((_, i) => 20000 + ((104729 * i) % 5000)));
  }
}
"""
_REBUILD = """(rows) => {
  const started = performance.now();
  const table = document.createElement('table');
  for (let i = 0; i < rows; i += 1) {
    const row = table.insertRow();
    for (let j = 0; j < 16; j += 1) row.insertCell().append(`${i + j} MiB`);
  }
  window.rebuilt = table;
  return performance.now() - started;
}"""


def main() -> int:
    options = Options(__doc__)
    options.amount("--seconds", 60.0, 12.0, "seconds of refreshes")
    given = options.read()
    progress = Progress("page", 3)
    progress.part(f"start of {PROCESSES} reporters")
    with Place(real_gpu=given.real_gpu, devices=DEVICES) as place:
        stand = place.stack.enter_context(Stand(PROCESSES))
        exporter = place.exporter()
        uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
        _change_driver_bytes(place, stand)
        place.start(report_for_ever, exporter.tcp_url, stand.pids, uuids, 1.0)
        wait_for(lambda: len(exporter.processes()) == PROCESSES, f"{PROCESSES} reporting processes")
        rows = _measure(progress, exporter, given.seconds, len(uuids) * PROCESSES)
    return show("page", rows, as_json=given.json)


def _measure(progress: Progress, exporter: ExporterProcess, seconds: float, rows: int) -> list[Row]:
    progress.part("exporter without a page")
    (before,) = cpu_shares(progress, [exporter.pid], seconds / 4)
    progress.part(f"page of {rows} rows")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page()
        page.add_init_script(_LISTEN)
        page.goto(exporter.tcp_url)
        page.wait_for_function("(rows) => document.querySelectorAll('#rows tr').length === rows", arg=rows)
        page.evaluate("seen.refreshes.length = seen.replies.length = seen.longTasks.length = 0")
        rebuilt: list[float] = []
        used = cpu_seconds(exporter.pid)
        started = time.monotonic()
        for _ in progress.turns(int(seconds)):
            page.wait_for_timeout(1000)
            rebuilt.append(page.evaluate(_REBUILD, rows))
        share = 100 * (cpu_seconds(exporter.pid) - used) / (time.monotonic() - started)
        seen: dict[str, Any] = page.evaluate("seen")
        size = _state_bytes(page)
        browser.close()
    refreshes, replies = seen["refreshes"], seen["replies"]
    beside, base = f"building a table of {rows} rows", typical(rebuilt)
    return [
        compared("script of a refresh", typical(refreshes), "ms", beside, base, SCRIPT_RATIO),
        compared("the same with the parsing of the reply", typical(replies), "ms", beside, base),
        Row("the same, p95", percentile(replies, 0.95), "ms"),
        Row(
            "tasks of over 50 ms, layout and paint included", len(seen["longTasks"]), "", f"{len(refreshes)} refreshes"
        ),
        Row("state without its history", size / 1e3, "kB"),
        compared("exporter's CPU with one page open", share, "% of a core", "without a page", before),
        Row("exporter's RSS", resident_bytes(exporter.pid) / 1e6, "MB"),
    ]


def _change_driver_bytes(place: Place, stand: Stand) -> None:
    """Change the bytes of every process once a second, and those of every eighth one enough to change its row."""
    node = place.node
    if node is None:
        return
    ended = threading.Event()

    def run() -> None:
        turn = 0
        while True:
            turn += 1
            for number, pid in enumerate(stand.pids):
                for device in range(DEVICES):
                    more = (turn + device) % 7
                    if number % 8 == 0:
                        more += 100 * ((turn * 7 + number + device) % 10)
                    node.set_process(pid, device, HELD_BYTES + more * (1 << 20))
            if ended.wait(1.0):
                return

    changing = threading.Thread(target=run)
    changing.start()
    place.stack.callback(changing.join)
    place.stack.callback(ended.set)


def _state_bytes(page: Page) -> int:
    return int(page.evaluate("fetch('/api/v1/live').then((a) => a.json()).then((a) => JSON.stringify(a.state).length)"))


if __name__ == "__main__":
    sys.exit(main())
