"""What a refresh of the live page costs the browser: Chromium, the real exporter, 8 devices with 64 processes on each.

    python -m benchmarks.page [--json] [--real-gpu]

The script's time is the page's own measure of each refresh, which is one a second, and with it what the browser needs
to read the event. In turns with it, in the same page, a table of as many cells is written afresh without anything else:
the least that so many new texts could cost. What the driver says of every process changes with every poll. The page is
told of ten minutes before the exporter's start, as it would be by an exporter that runs for longer: lines as long as
they become are drawn all the time. Needs Chromium and the Python package playwright.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import sys
import threading
import time
from contextlib import ExitStack
from typing import Any

from playwright.sync_api import Page, sync_playwright

from benchmarks.claims import Row, parser, percentile, show
from benchmarks.place import Exporter, Place, cpu_seconds, resident_bytes
from benchmarks.reporters import HELD_BYTES, Stand, report_for_ever
from tests.support.waiting import wait_for

PROCESSES = 64
DEVICES = 8
SCRIPT_MS = 16.0
FIGURES = 5
"""Cells with bytes in each row."""

_LISTEN = """
window.seen = {refreshes: [], events: [], longTasks: []};
new PerformanceObserver((list) => {
  for (const entry of list.getEntriesByName('refresh')) seen.refreshes.push(entry.duration);
}).observe({type: 'measure'});
new PerformanceObserver((list) => {
  for (const entry of list.getEntries()) seen.longTasks.push(entry.duration);
}).observe({type: 'longtask'});
const listen = EventSource.prototype.addEventListener;
EventSource.prototype.addEventListener = function (type, take) {
  listen.call(this, type, (event) => {
    const given = type === 'history' ? {data: withPast(event.data)} : event;
    const begun = performance.now();
    take(given);
    if (type !== 'history') seen.events.push(performance.now() - begun);
  });
};
function withPast(data) {
  const history = JSON.parse(data);
  const past = [];
  for (let i = 299; i > 0; i -= 1) past.push(history.seconds[0] - 2 * i);
  history.seconds.unshift(...past);
  for (const line of Object.values(history.devices)) {
    line.in_use.unshift(...past.map((_, i) => 40000 + ((7919 * i) % 20000)));
    line.allocated.unshift(...past.map((_, i) => 20000 + ((104729 * i) % 5000)));
  }
  return JSON.stringify(history);
}
"""
_LEAST = """(cells) => {
  if (!window.least) {
    const table = document.createElement('table');
    table.hidden = true;
    for (let i = 0; i < cells / 16; i += 1) {
      const row = table.insertRow();
      for (let j = 0; j < 16; j += 1) row.insertCell().append('0');
    }
    document.body.append(table);
    window.least = {texts: [...table.querySelectorAll('td')].map((cell) => cell.firstChild), round: 0};
  }
  least.round += 1;
  const begun = performance.now();
  for (let i = 0; i < least.texts.length; i += 1) least.texts[i].data = `${i + least.round} MiB`;
  return performance.now() - begun;
}"""


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--seconds", type=float, default=60.0, help="of refreshes (default: %(default)s)")
    options = made.parse_args()
    with ExitStack() as stack:
        place = stack.enter_context(Place(real_gpu=options.real_gpu, devices=DEVICES))
        stand = stack.enter_context(Stand(PROCESSES))
        exporter = place.exporter()
        uuids = [device["uuid"] for device in exporter.get("/api/v1/devices")["devices"]]
        _let_the_driver_talk(stack, place, stand)
        reporters = multiprocessing.get_context("spawn").Process(
            target=report_for_ever, args=(exporter.tcp_url, stand.pids, uuids, 1.0), daemon=True
        )
        reporters.start()
        stack.callback(reporters.kill)
        wait_for(lambda: len(exporter.processes()) == PROCESSES, f"{PROCESSES} reporting processes")
        rows = _measure(exporter, options.seconds, len(uuids) * PROCESSES)
    return show("page", rows, as_json=options.json)


def _measure(exporter: Exporter, seconds: float, rows: int) -> list[Row]:
    before = _share(exporter, seconds / 4)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=shutil.which("chromium"), args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        page = browser.new_page()
        page.add_init_script(_LISTEN)
        page.goto(exporter.tcp_url)
        page.wait_for_function("(rows) => document.querySelectorAll('#rows tr').length === rows", arg=rows)
        page.evaluate("seen.refreshes.length = seen.events.length = seen.longTasks.length = 0")
        least: list[float] = []
        used = cpu_seconds(exporter.pid)
        begun = time.monotonic()
        while time.monotonic() - begun < seconds:
            page.wait_for_timeout(1000)
            least.append(page.evaluate(_LEAST, rows * FIGURES))
        share = 100 * (cpu_seconds(exporter.pid) - used) / (time.monotonic() - begun)
        seen: dict[str, Any] = page.evaluate("seen")
        size = _state_bytes(page)
        browser.close()
    refreshes, events, floor = seen["refreshes"], seen["events"], statistics.median(least)
    name = f"{rows} rows"
    beside = f"{rows * FIGURES} new texts and nothing else ({floor:.2f} ms)"
    median = statistics.median(refreshes)
    return [
        Row(f"{name}: script of a refresh, median", median, "ms", SCRIPT_MS, beside, median / floor),
        Row(f"{name}: script of a refresh, p95", percentile(refreshes, 0.95), "ms"),
        Row(f"{name}: script of a refresh, longest", max(refreshes), "ms"),
        Row(f"{name}: the same with the reading of the event, median", statistics.median(events), "ms"),
        Row(f"{name}: the same with the reading of the event, p95", percentile(events, 0.95), "ms"),
        Row(f"{name}: refreshes", len(refreshes), ""),
        Row(f"{name}: tasks of over 50 ms, layout and paint included", len(seen["longTasks"]), ""),
        Row(f"{name}: the state, without its history", size / 1e3, "kB"),
        Row("exporter with one page open", share, "% of a core", None, f"with none ({before:.2f} %)", share / before),
        Row("exporter, RSS", resident_bytes(exporter.pid) / 1e6, "MB"),
    ]


def _let_the_driver_talk(stack: ExitStack, place: Place, stand: Stand) -> None:
    """Every process' bytes change about once a second, and those of each eighth enough to change its place."""
    node = place.node
    if node is None:
        return
    ended = threading.Event()

    def run() -> None:
        turn = 0
        while True:
            turn += 1
            for place_of, pid in enumerate(stand.pids):
                for device in range(DEVICES):
                    more = (turn + device) % 7
                    if place_of % 8 == 0:
                        more += 100 * ((turn * 7 + place_of + device) % 10)
                    node.set_process(pid, device, HELD_BYTES + more * (1 << 20))
            if ended.wait(1.0):
                return

    talking = threading.Thread(target=run)
    talking.start()
    stack.callback(talking.join)
    stack.callback(ended.set)


def _share(exporter: Exporter, seconds: float) -> float:
    begun, used = time.monotonic(), cpu_seconds(exporter.pid)
    time.sleep(seconds)
    return 100 * (cpu_seconds(exporter.pid) - used) / (time.monotonic() - begun)


def _state_bytes(page: Page) -> int:
    return int(page.evaluate("fetch('/api/v1/live').then((a) => a.json()).then((a) => JSON.stringify(a.state).length)"))


if __name__ == "__main__":
    sys.exit(main())
