"""Pages in Chromium without an exporter: of a profile, opened as a file, and of PyTorch's debug server with two ranks.

The page of a profile has no network, its own policy, the keyboard, and hostile names.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from gpumem_client.profile.profile_types import Frame, Owner
from gpumem_exporter.features.profiles.profile_diff import difference
from gpumem_exporter.features.profiles.profile_formats import render
from gpumem_exporter.features.profiles.profile_lines import ShownProfile
from gpumem_exporter.features.profiles.stored_profile import StoredProfile
from tests.emulation.fixtures import MakeNode, StartTorch
from tests.support.builders.builders import MIB
from tests.support.builders.profile_documents import MAIN, made_up, stored, training
from tests.support.processes.live_page import browser
from tests.support.torch_release import torch_release
from tests.support.waiting import patient

__all__ = ["browser"]

Open = Callable[[StoredProfile | list[ShownProfile]], Page]
HOSTILE = "</script><img src=x onerror=alert(1)><!--<script>\u202e&amp;\"'"


@pytest.fixture
def open_profile(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Open]:
    """Return a function that opens a profile's page; at the end, the page must have requested and reported nothing."""
    chromium: Browser = request.getfixturevalue("browser")
    pages: list[Page] = []
    requested: list[str] = []
    complaints: list[str] = []

    def open_(profile: StoredProfile | list[ShownProfile]) -> Page:
        path = tmp_path / f"{len(pages)}.html"
        shown = profile if isinstance(profile, list) else profile.shown("html", "live")
        path.write_bytes(render(shown, "html")[0])
        page = chromium.new_context(offline=True).new_page()
        page.set_default_timeout(patient(30_000))
        page.on("request", lambda request: requested.append(request.url))
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("dialog", lambda dialog: complaints.append(dialog.message))
        pages.append(page)
        page.goto(path.as_uri())
        page.locator("g.frame").first.wait_for()
        return page

    yield open_
    assert [url for url in requested if not url.startswith(("file:", "data:"))] == []
    assert complaints == []
    for page in pages:
        page.context.close()


def details(page: Page) -> str:
    return page.locator("#details").inner_text()


def frames(page: Page) -> list[str]:
    return page.locator("g.frame").evaluate_all("all => all.map((each) => each.getAttribute('name'))")


def test_tables_come_first_and_follow_the_moment(open_profile: Open) -> None:
    page = open_profile(stored(training()))
    headings = page.locator("h2:visible").all_inner_texts()
    assert headings[-1] == "Flame graph"
    assert page.locator("td", has_text="model.py:30 in forward").first.is_visible()
    assert not page.locator("td", has_text="model.py:12 in forward").first.is_visible()
    assert details(page).startswith("4.5 GiB")
    page.get_by_role("button", name="At the highest moment").click()
    assert page.locator("td", has_text="model.py:12 in forward").first.is_visible()
    assert details(page).startswith("6.1 GiB")


def test_the_graph_is_used_with_the_keyboard(open_profile: Open) -> None:
    page = open_profile(stored(training()))
    page.locator("#graph").focus()
    for key in ("ArrowDown", "ArrowDown"):
        page.keyboard.press(key)
    assert ": optimizer state" in details(page)
    page.keyboard.press("ArrowRight")
    assert ": parameters" in details(page)
    page.keyboard.press("Enter")
    zoomed = frames(page)
    assert "parameters" in zoomed
    assert "optimizer state" not in zoomed
    page.keyboard.press("Escape")
    assert "optimizer state" in frames(page)
    page.keyboard.press("/")
    page.keyboard.type("TRAIN_STEP")
    assert page.locator("#found").inner_text() == "300 MiB, 6.5 %"


def test_names_of_another_users_process_are_text(open_profile: Open) -> None:
    hostile = made_up(
        [
            (0, (Frame(HOSTILE, HOSTILE, 1), MAIN), Owner("tensors", HOSTILE, HOSTILE, HOSTILE), 9 * MIB, 9 * MIB),
            (0, (), Owner("parameters", HOSTILE), 8 * MIB, 8 * MIB),
            (0, (), Owner(HOSTILE), 7 * MIB, 7 * MIB),
            (0, (), Owner("constructor"), 6 * MIB, 6 * MIB),
        ],
        notes=(HOSTILE,),
    )
    page = open_profile(stored(hostile, workload=HOSTILE, rank=HOSTILE))
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 4
    assert "</script><img" in page.locator("h1").inner_text()
    assert page.locator("dt", has_text="constructor").inner_text() == "constructor"
    page.locator("#graph").focus()
    for _ in range(4):
        page.keyboard.press("ArrowDown")
    assert "onerror" in details(page)
    assert "\u202e" not in page.inner_text("body")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_is_accessible(open_profile: Open, scheme: str) -> None:
    page = open_profile(stored(training()))
    page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
    found = Axe().run(page).response["violations"]
    assert [
        f"{rule['id']}: {node['target']} {node['failureSummary']}" for rule in found for node in rule["nodes"]
    ] == []


def test_a_difference_has_views_of_what_grew_and_what_shrank(open_profile: Open) -> None:
    page = open_profile([difference(stored(training(leaked=100)).at("live"), stored(training()).at("live"))])
    assert page.locator("h1").inner_text() == "What changed in the memory of llm-pretrain rank 0"
    assert details(page).startswith("200 MiB")
    assert page.locator("td", has_text="+200 MiB").first.is_visible()
    page.get_by_role("button", name="Everything afterwards").click()
    assert details(page).startswith("4.5 GiB")
    page.get_by_role("button", name="What shrank").click()
    assert details(page).startswith("0 B")


def test_each_view_of_a_difference_lists_its_largest_owners(open_profile: Open) -> None:
    sizes = {f"grows_{chr(97 + i // 26)}{chr(97 + i % 26)}": (10 * MIB, 20 * MIB) for i in range(120)}
    sizes |= {"shrinks": (2 * MIB, MIB), "stays": (500 * MIB, 500 * MIB)}
    before, after = (
        stored(made_up([(0, (), Owner("tensors", name), each[i], None) for name, each in sizes.items()])).at("live")
        for i in (0, 1)
    )
    page = open_profile([difference(before, after)])
    first = page.locator("#tables tbody tr").first
    assert "105 more: 1.0 GiB" in page.locator("#tables").inner_text()
    page.get_by_role("button", name="What shrank").click()
    assert first.inner_text().startswith("shrinks")
    page.get_by_role("button", name="Everything afterwards").click()
    assert first.inner_text().startswith("stays")
    assert "Largest owners" in page.locator("#tables").inner_text()


def test_rows_share_frames_whose_files_have_any_name(open_profile: Open) -> None:
    inner, outer = Frame("step", "/src/copy (2)/train.py", 7), Frame("main", "/src/copy (2)/train.py", 3)
    page = open_profile(
        stored(made_up([(0, (inner, outer), None, 9 * MIB, 9 * MIB), (0, (outer,), None, 8 * MIB, 8 * MIB)]))
    )
    page.locator("#graph").focus()
    for _ in range(2):
        page.keyboard.press("ArrowDown")
    assert details(page) == "17.0 MiB, 100.0 %, 2 blocks: main (/src/copy (2)/train.py:3)"
    page.keyboard.press("ArrowDown")
    assert details(page).endswith(": step (/src/copy (2)/train.py:7)")


# The page Memory of PyTorch's debug server


RANK = """
import os
from types import SimpleNamespace
import gpumem_toolkit as toolkit
from gpumem_client.allocator.allocator import attached
from gpumem_client.commands.profiling import Profiling
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.wire.protocol import Command
from torch.distributed import debug
if rank == 0:
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    master = store.port
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(master), RANK=str(rank), WORLD_SIZE="2")
held = torch.empty((rank + 1) * (8 << 20), dtype=torch.uint8, device="cuda")
reader = HeapReader(torch, attached())
taken = Profiling(reader, None, SimpleNamespace(step=None), capturing=lambda: False, send=lambda profile: profile.id)
taken.start(Command("p", "profile", 60.0, force=True))
assert taken.run_due().outcome == "done"
debug.start_debug_server(port=port, start_method="fork", handlers=toolkit.debug_handlers())
result = master
"""


@pytest.mark.skipif(torch_release() < (2, 15), reason="torch before 2.15 has no pages of other libraries")
def test_the_page_has_all_ranks_side_by_side(
    make_node: MakeNode, start_torch: StartTorch, request: pytest.FixtureRequest
) -> None:
    chromium: Browser = request.getfixturevalue("browser")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [start_torch(make_node(devices=1)) for _ in range(2)]
    master = processes[0].exec(RANK, rank=0, port=port, master=0)
    processes[1].exec(RANK, rank=1, port=port, master=master)
    try:
        page = chromium.new_page()
        page.set_default_timeout(patient(30_000))
        page.goto(f"http://127.0.0.1:{port}/")
        page.get_by_role("link", name="Memory").click()
        rows = page.locator("#gpumem tr")
        rows.first.wait_for()
        assert rows.count() == 3
        for rank, allocated in enumerate(("8.0 MiB", "16.0 MiB")):
            cells = rows.nth(rank + 1).locator("td").all_inner_texts()
            assert cells[0] == str(rank)
            assert cells[1].startswith("cuda:0")
            assert cells[2] == allocated
            assert "s ago: tensors " in cells[-1]
            assert "'held'" in cells[-1]
            assert cells[-1].endswith(allocated)
    finally:
        processes[0].exec("debug.stop_debug_server()")


def test_without_the_server_there_is_one_debug_line(start_torch: StartTorch) -> None:
    code = """
import logging, sys
import gpumem_toolkit as toolkit
lines = []
handler = logging.Handler()
handler.emit = lambda record: lines.append(record.levelname)
log = logging.getLogger("gpumem_toolkit")
log.addHandler(handler)
log.setLevel(logging.DEBUG)
sys.modules["tabulate"] = None
result = [toolkit.debug_handlers(), lines]
"""
    assert start_torch().exec(code) == [None, ["DEBUG"]]
