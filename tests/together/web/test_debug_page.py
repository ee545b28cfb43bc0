"""The page Memory of PyTorch's debug server in Chromium, with two ranks."""

from __future__ import annotations

import socket

import pytest
from playwright.sync_api import Browser

from tests.emulation.fixtures import MakeNode, StartTorch
from tests.support.processes.live_page import browser
from tests.support.torch_release import torch_release
from tests.support.waiting import patient

__all__ = ["browser"]

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
