"""The live page: its content, its accessibility, and its refresh."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from playwright.sync_api import Browser

from gpumem_exporter.server.web.live import COLUMNS
from tests.support.builders import MIB, UUIDS
from tests.support.exporter_process import ExporterProcess
from tests.support.live_page import OpenPage, browser, open_page, send, serving, state_of
from tests.support.waiting import patient

__all__ = ["browser", "open_page"]

GIB = 1 << 30
NASTY = "<img src=x onerror=\"document.title='taken over'\"><script>document.title='taken over'</script>"


@pytest.fixture(scope="module")
def driverless(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExporterProcess]:
    """An exporter without a driver, to which the test reports processes."""
    with serving(tmp_path_factory.mktemp("driverless"), "--report.expiry", "3600") as exporter:
        yield exporter


TURNED = "\u202ehtob \u2066x\n\x1b[31m"


def known_device(**changes: Any) -> dict[str, Any]:
    """A device of 10 GiB."""
    ledger = {
        "torch_allocated": 4 * GIB,
        "torch_reclaimable": 2 * GIB,
        "torch_fragmented": 1 * GIB,
        "non_torch": GIB // 2,
        "other_processes": 0,
        "driver_reserved": GIB // 2,
        "unattributed": 0,
        "free": 2 * GIB,
    }
    memory = {"total_bytes": 10 * GIB, "of_host": False}
    device = {"gpu": "0", "uuid": UUIDS[0], "name": "Test", "mig_profile": "", "up": True, "error": ""}
    space = {"idle_cache_bytes": GIB // 2, "allocatable_bytes": 5 * GIB // 2}
    return {**device, "memory": memory, "utilization_ratio": 0.5, "ledger": ledger, **space, **changes}


def made_up(exporter: ExporterProcess, *devices: dict[str, Any], **process: Any) -> dict[str, Any]:
    """The exporter's own document with these devices, and a process on the first one with these values if any."""
    answer = copy.deepcopy(state_of(exporter))
    state = answer["state"]
    state.update(devices=list(devices), source="nvml", nvml={"up": True, "error": "", "driver_version": "1"})
    if process:
        row = {"pid": 77, "state": "reporting", "uuid": UUIDS[0], "gpu": "0", "clears": True, **process}
        state["processes"] = [[row.get(name) for name in state["columns"]]]
    return answer


def advancing(exporter: ExporterProcess, *devices: dict[str, Any], **process: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that answers as `made_up`, each time 20 s later: such a warning must last for some time."""
    answers = itertools.count(1)

    def answer() -> dict[str, Any]:
        document = made_up(exporter, *devices, **process)
        document["moment"]["clock_seconds"] += 20 * next(answers)
        return document

    return answer


def test_the_parts_of_each_bar_add_up_to_the_devices_memory(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo, viewport={"width": 1280, "height": 900})
    devices = demo.get("/api/v1/devices")["devices"]
    assert live.page.locator(".device").count() == len(devices) == 8
    for card, device in enumerate(devices):
        ledger = live.ledger(card)
        assert None not in ledger.values()
        assert sum(value or 0 for value in ledger.values()) == device["memory"]["total_bytes"]
        assert f"GPU {device['gpu']}" in live.text(f".device:nth-child({card + 1}) h3")
    widths = live.page.evaluate(
        """() => [...document.querySelector('.device .ledger').querySelectorAll('.part:not([hidden])')]
            .map((part) => [Number(part.dataset.bytes), part.getBoundingClientRect().width])"""
    )
    scale = sum(width for _, width in widths) / sum(size for size, _ in widths)
    assert all(abs(width - size * scale) <= 2 + 0.02 * width for size, width in widths)


def test_the_chart_has_the_last_ten_minutes_at_once(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)
    lines = live.page.evaluate("[...document.querySelectorAll('.chart .in-use')].map((path) => path.getAttribute('d'))")
    assert len(lines) == 8
    number = r"-?\d+"
    stretch = rf"M{number} {number}h1(L{number} {number})*"  # a busy machine may leave a hole: then there are several
    assert [line for line in lines if not re.fullmatch(rf"({stretch})+", line) or "L" not in line] == []
    assert re.search(r"in use (for|in) \d+ (s|min)", live.text("figcaption"))


def test_a_demo_is_labeled_and_its_events_are_listed(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo)
    assert live.page.locator(".demo").is_visible()
    assert "demo" in live.page.title()
    live.page.locator("#events li[data-type=process_started]").first.wait_for()
    assert "demo-" in live.text("#events li[data-type=process_started]")


@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (2560, "dark"), (1100, "light"), (320, "light")])
def test_the_page_is_accessible(demo: ExporterProcess, open_page: OpenPage, width: int, scheme: str) -> None:
    live = open_page(demo, viewport={"width": width, "height": 800}, color_scheme=scheme)
    live.page.locator("#events li").first.wait_for()
    assert live.violations_of_access() == []
    assert live.page.evaluate("document.documentElement.scrollWidth") <= width
    live.page.locator("#clear-all").click()
    live.page.locator("#dialog-results").wait_for()
    assert live.violations_of_access() == []


def test_rows_are_sorted_and_filtered_by_keyboard_alone(demo: ExporterProcess, open_page: OpenPage) -> None:
    live = open_page(demo, viewport={"width": 1280, "height": 900})
    page = live.page
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "filter"
    page.keyboard.type("demo-llm")
    live.until("[...document.querySelectorAll('#rows tr:not([hidden])')].length === 4")
    assert re.match(r"4\b.*\d", live.text("#count"))
    for _ in range(2):  # past the workload, to the rank
        page.keyboard.press("Tab")
    page.keyboard.press("Enter")
    assert page.locator("#head [aria-sort=ascending]").inner_text() == "Rank"
    ranks = "#rows tr:not([hidden]) [data-column=rank]"
    assert page.locator(ranks).all_inner_texts() == ["0", "1", "2", "3"]
    page.keyboard.press("Enter")
    assert page.locator("#head [aria-sort=descending]").inner_text() == "Rank"
    assert page.locator(ranks).all_inner_texts() == ["3", "2", "1", "0"]


def test_without_a_driver_the_reason_and_the_reporting_processes_are_shown(
    driverless: ExporterProcess, open_page: OpenPage
) -> None:
    send(driverless, 501, 70 * MIB, workload="lonely")
    live = open_page(driverless)
    live.page.locator("#degraded").wait_for()
    assert "NVML" in live.text("#degraded")
    assert driverless.get("/health")["nvml"]["error"] in live.text("#degraded")
    assert live.page.locator("#no-devices").is_visible()
    live.until("document.querySelector('#rows').textContent.includes('lonely')")
    row = live.text("#rows tr:has-text('lonely')")
    assert "70.0 MiB" in row
    assert "–" in row  # the driver's values are unknown


def test_names_of_processes_are_inserted_as_text(driverless: ExporterProcess, open_page: OpenPage) -> None:
    send(driverless, 502, MIB, workload=NASTY, rank="<b>0</b>", command="<i>python</i>")
    live = open_page(driverless)
    live.until("document.querySelector('#rows').textContent.includes('onerror')")
    assert NASTY in live.page.locator("#rows tr:has-text('onerror') [data-column=workload]").inner_text()
    live.until("document.querySelector('#events').textContent.includes('onerror')")
    live.page.locator("#clear-all").click()
    live.until("document.querySelector('#dialog-results').textContent.includes('onerror')")
    assert (
        live.page.evaluate("document.querySelectorAll('body img, body b, body i, body script:not([type])').length") == 0
    )
    assert live.page.title().endswith(" · GPU memory")


def test_a_name_cannot_reverse_the_text_around_it(driverless: ExporterProcess, open_page: OpenPage) -> None:
    send(driverless, 503, MIB, workload=TURNED)
    live = open_page(driverless)
    row = live.page.locator("#rows tr:has-text('htob')")
    row.wait_for()
    live.page.locator("#events li:has-text('htob')").wait_for(state="attached")
    row.get_by_role("button").click()
    live.until("document.querySelector('#dialog-results').textContent.includes('htob')")
    assert live.page.evaluate("document.body.textContent.match(/[\u202e\u2066\x1b]/)") is None
    assert "\ufffdhtob \ufffdx\ufffd\ufffd[31m (pid 503@" in live.text("#dialog-title")


def test_a_long_name_leaves_the_other_columns_readable(demo: ExporterProcess, open_page: OpenPage) -> None:

    names = {"workload": "w" * 200, "rank": "r" * 30, "user": "u" * 32, "k8s_pod": "p" * 100}
    sizes = {name: 1023 * MIB for name in COLUMNS if name.endswith("_bytes")}
    times = {"last_report_unix_seconds": 0}
    live = open_page(demo, answer=lambda: made_up(demo, known_device(), pid=1234567, **names, **sizes, **times))
    for width in (1280, 1000, 320):
        live.page.set_viewport_size({"width": width, "height": 800})
        assert live.page.evaluate("document.documentElement.scrollWidth") <= width
        if width > 992:  # below, a row is a card
            lines = """() => ['[data-column=pid] .value', '.row-act button'].map((part) => {
                const range = document.createRange();
                range.selectNodeContents(document.querySelector(`#rows ${part}`));
                return new Set([...range.getClientRects()].map((line) => line.top)).size;
            })"""
            assert live.page.evaluate(lines) == [1, 1]


def test_rows_are_sorted_again_after_some_seconds(driverless: ExporterProcess, open_page: OpenPage) -> None:
    for pid in (701, 702):
        send(driverless, pid, pid * MIB, workload="racing")
    live = open_page(
        driverless,
        script="window.ahead = 0; const now = performance.now; performance.now = () => ahead + now.call(performance);",
    )
    live.page.get_by_label("Filter").fill("racing")
    live.page.get_by_role("button", name="Allocated").click()
    first = "[...document.querySelectorAll('#rows tr')].find((row) => !row.hidden).textContent"
    live.until(f"{first}.includes('702')")
    live.page.evaluate("ahead = -1e6")  # the rows have been sorted a moment ago, however slow the machine is
    send(driverless, 701, 800 * MIB, workload="racing", sequence=2)
    live.until("document.querySelector('#rows').textContent.includes(it)", "800\u00a0MiB")
    assert "702" in live.page.evaluate(first)
    live.page.evaluate("ahead = 1e6")
    live.until(f"{first}.includes('701')")


def test_unknown_values_are_shown_as_unknown(demo: ExporterProcess, open_page: OpenPage) -> None:
    partly = known_device()
    for category in ("non_torch", "other_processes", "driver_reserved"):
        del partly["ledger"][category]
    partly["ledger"]["unattributed"] = GIB
    lost = known_device(gpu="1", uuid=UUIDS[1], memory=None, ledger=None, up=False, error="GPU is lost")
    live = open_page(demo, answer=lambda: made_up(demo, partly, lost))
    assert live.ledger(0) == {**partly["ledger"], "non_torch": None, "other_processes": None, "driver_reserved": None}
    unknown = live.page.locator(".device:first-child .amount.unknown")
    assert unknown.all_inner_texts() == ["non-torch\nunknown", "other processes\nunknown", "driver reserved\nunknown"]
    assert live.text("#node [data-category=non_torch]") == "unknown"
    assert "GPU is lost" in live.text(".device:nth-child(2)")
    assert not live.page.locator(".device:nth-child(2) .ledger").is_visible()
    assert re.search(r"GPU 1\b.*GPU is lost", live.text("#warnings li[data-level=critical]"))


def test_allocatable_unmapped_and_nccl_s_memory_are_shown_where_they_are_known(
    demo: ExporterProcess, open_page: OpenPage
) -> None:
    process = {"workload": "engine", "non_torch_bytes": GIB, "last_report_unix_seconds": 0}
    process |= {"unmapped_bytes": 12 * GIB, "nccl_bytes": GIB // 4}
    unknown = known_device(gpu="1", uuid=UUIDS[1], allocatable_bytes=None)
    devices = [known_device(), known_device(gpu="2", uuid=UUIDS[2])]
    live = open_page(demo, answer=lambda: made_up(demo, *devices, **process))
    heads = live.page.locator(".device .head p")
    assert heads.all_inner_texts() == ["2.0\u00a0GiB free, 2.5\u00a0GiB allocatable"] * 2
    assert live.text("#node .sum").endswith("4.0 GiB free, 5.0 GiB allocatable")
    assert "12.0 GiB unmapped (sleeping)" in live.text("#rows [data-column=last]")
    assert live.text("#rows [data-column=non_torch_bytes]").split("\n") == ["1.0 GiB", "NCCL 256 MiB"]
    assert live.page.locator("#rows .detail").get_attribute("title") == "CUDA context and other: 768\u00a0MiB"
    devices[1] = unknown
    process |= {"unmapped_bytes": 0, "nccl_bytes": None}
    live.until("!/NCCL|unmapped/.test(document.querySelector('#rows').textContent)")
    assert heads.all_inner_texts() == ["2.0\u00a0GiB free, 2.5\u00a0GiB allocatable", "2.0\u00a0GiB free"]
    assert "allocatable" not in live.text("#node .sum")


def test_a_negative_category_is_drawn_as_an_overlap(demo: ExporterProcess, open_page: OpenPage) -> None:
    device = known_device()
    device["ledger"].update(unattributed=-GIB, free=3 * GIB)
    live = open_page(demo, answer=lambda: made_up(demo, device))
    assert sum(value or 0 for value in live.ledger(0).values()) == 10 * GIB
    assert live.text(".device [data-category=unattributed]") == "−1.0 GiB"
    drawn = live.page.evaluate(
        """() => {
            const bar = document.querySelector('.device .ledger');
            const widths = ['.overlap', '.free'].map((part) => bar.querySelector(part).getBoundingClientRect());
            return widths.map((part) => [part.left, part.right].map(
                (x) => (x - bar.getBoundingClientRect().left) / bar.getBoundingClientRect().width));
        }"""
    )
    (overlap_left, overlap_right), (free_left, _) = drawn
    assert overlap_right == pytest.approx(free_left, abs=0.03)
    assert overlap_right - overlap_left == pytest.approx(1 / 11, abs=0.01)


def test_a_missing_point_is_a_gap_in_the_line(demo: ExporterProcess, open_page: OpenPage) -> None:

    def answer() -> dict[str, Any]:
        document = made_up(demo, known_device())
        now = document["moment"]["clock_seconds"]
        ages = (500, 498, 496, 494, 300, 298, 296)
        document["history"].update(
            seconds=[now - age for age in ages],
            devices={UUIDS[0]: {"in_use": [5000, None, 6000, 6500, 7000, 7500, 7600], "allocated": [100] * 7}},
        )
        return document

    live = open_page(demo, answer=answer)
    path = live.page.locator(".device .in-use").get_attribute("d")
    assert [run.count("L") for run in str(path).split("M")[1:]] == [0, 1, 2]
    assert "in 500 s" in live.text("figcaption") or "in 8 min" in live.text("figcaption")


def test_a_device_is_full_if_little_of_it_is_free_or_reclaimable(demo: ExporterProcess, open_page: OpenPage) -> None:
    device = known_device()

    def fill(reclaimable: int) -> None:
        allocated = 7 * GIB + 3 * GIB // 4 - reclaimable
        device["ledger"].update(free=GIB // 4, torch_allocated=allocated, torch_reclaimable=reclaimable)

    def answer() -> dict[str, Any]:
        sizes = {"used_bytes": 6 * GIB, "reclaimable_bytes": device["ledger"]["torch_reclaimable"]}
        return made_up(demo, device, workload="hoarder", last_report_unix_seconds=0, **sizes)

    fill(GIB // 8)
    live = open_page(demo, answer=answer)
    text = live.text("#warnings li[data-level=critical]")
    assert re.search(r"GPU 0 is full: 256 MiB\b.*10\.0 GiB\b.*hoarder \(pid 77\).*6\.0 GiB.*128 MiB.*hoarder", text), (
        text
    )
    level = "document.querySelector('.device').dataset.level === it"
    live.until(level, "critical")
    fill(GIB // 2)
    live.until(level, "warning")
    live.until("/nearly full/.test(document.querySelector('#warnings').textContent)")
    fill(2 * GIB)
    live.until(level, "ok")


def test_a_cache_with_an_unknown_reclaimable_part_is_not_called_fragmented(
    demo: ExporterProcess, open_page: OpenPage
) -> None:
    full = known_device()
    full["ledger"].update(free=GIB // 4, torch_allocated=4 * GIB, torch_fragmented=4 * GIB + 3 * GIB // 4)
    del full["ledger"]["torch_reclaimable"]
    values = {"workload": "pool", "allocated_bytes": 4 * GIB, "reserved_bytes": 35 * GIB // 4}
    live = open_page(demo, answer=advancing(demo, full, **values))
    live.until("/GPU.0\\b/.test(document.querySelector('#warnings [data-level=critical]').textContent)")
    first = live.text("#moment")
    live.until("document.querySelector('#moment').textContent !== it", first)
    warnings = live.page.locator("#warnings li[data-level=warning]").all_inner_texts()
    assert [text for text in warnings if re.search(r"GPU.0\b", text)] == []


def test_unattributed_memory_is_a_warning_only_if_all_processes_are_known(
    demo: ExporterProcess, open_page: OpenPage
) -> None:
    hidden, host, moving = (known_device(gpu=str(number), uuid=UUIDS[number]) for number in (1, 2, 3))
    del hidden["ledger"]["other_processes"]
    host["memory"]["of_host"] = True
    devices = (known_device(), hidden, host, moving)
    for device in devices:
        device["ledger"]["unattributed"] = 3 * GIB // 2
    live = open_page(demo, answer=advancing(demo, *devices, uuid=UUIDS[3], gpu="3", used_bytes=GIB))
    live.until("/GPU.0: 1\\.5.GiB/.test(document.querySelector('#warnings').textContent)")
    shown = " ".join(live.page.locator("#warnings li").all_inner_texts())
    assert re.findall(r"GPU.(\d): 1\.5.GiB", shown) == ["0"]


def test_a_page_of_another_version_reloads_once(demo: ExporterProcess, open_page: OpenPage) -> None:

    def answer() -> dict[str, Any]:
        document = made_up(demo, known_device())
        document["state"]["page"] = "another"
        return document

    live = open_page(demo, answer=answer)
    first = live.text("#moment")
    live.until("document.querySelector('#moment').textContent !== it", first)
    assert live.requested.count(live.url) == 2


def test_the_description_of_the_api_shows_every_route_without_another_host(
    demo: ExporterProcess, browser: Browser
) -> None:
    requested, errors = [], []
    page = browser.new_page()
    page.on("request", lambda request: requested.append(request.url))
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.goto(f"{demo.tcp_url}/docs")
    page.set_default_timeout(patient(30_000))
    page.locator(".opblock").first.wait_for()
    shown = page.locator(".opblock-summary-path").all_inner_texts()
    assert {path.replace("\u200b", "") for path in shown} >= {"/metrics", "/api/v1/actions", "/api/v1/events"}
    page.locator(".opblock-post .opblock-summary").first.click()
    page.locator(".opblock-body").first.wait_for()
    assert page.get_by_role("button", name="Try it out").count() == 0
    loaded = {address for address in requested if not address.startswith("data:")}
    files = ("docs", "docs/swagger-ui.css", "docs/swagger-ui-bundle.js", "openapi.json")
    assert loaded == {f"{demo.tcp_url}/{name}" for name in files}
    assert errors == []
    page.close()
