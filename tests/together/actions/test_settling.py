"""What stays free after a clear, with real torch on the emulated node."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import patient, wait_for

SETTLE_SECONDS = 0.5
TRAINING = """
import os, time
import gpumem_client as client
while not os.path.exists(stop):
    activations = torch.empty(400 << 20, dtype=torch.uint8, device="cuda:0")
    del activations
    time.sleep(0.01)
    client.step()
result = True
"""
"""Steps that reserve 400 MiB again after each clear."""


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.fixture
def process(exporter: ExporterProcess, start_torch: StartTorch) -> TorchProcess:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="job", rank=0)
    process.call("free", numbers=[process.call("alloc", nbytes=400 * MIB)])
    exporter.wait_for_processes(process.pid)
    return process


@contextmanager
def training(process: TorchProcess, folder: Path) -> Iterator[None]:
    stop = folder / "stop"
    number = process.send("exec", code=TRAINING, stop=str(stop))
    try:
        yield
    finally:
        stop.touch()
        assert process.receive(number)


def settled(exporter: ExporterProcess, action: dict[str, Any]) -> dict[str, Any]:
    """Wait until an action has settled."""
    assert action["state"] == "done", action

    def document() -> dict[str, Any] | None:
        found: dict[str, Any] = exporter.get(f"/api/v1/actions/{action['id']}")
        return None if found["settling"] else found

    return wait_for(document, "the settling")


def test_what_a_job_reserves_again_is_not_still_free(
    exporter: ExporterProcess, process: TorchProcess, tmp_path: Path
) -> None:
    with training(process, tmp_path):
        wait_for(lambda: exporter.processes()[process.pid]["step"], "a step")
        action = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=SETTLE_SECONDS)
        assert (action["freed_bytes"], action["settling"], action["still_free_bytes"]) == (400 * MIB, True, None)
        later = settled(exporter, action)
    assert (later["freed_bytes"], later["still_free_bytes"], later["settle_seconds"]) == (400 * MIB, 0, SETTLE_SECONDS)
    assert [row["still_free_bytes"] for row in later["results"]] == [0]


def test_what_an_idle_notebook_released_stays_free(
    exporter: ExporterProcess, process: TorchProcess, node: EmulatedNode
) -> None:
    before = node.books().used_by(process.pid)
    action = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=SETTLE_SECONDS)
    assert settled(exporter, action)["still_free_bytes"] == before - node.books().used_by(process.pid) == 400 * MIB
    process.call("free", numbers=[process.call("alloc", nbytes=400 * MIB)])
    action = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=SETTLE_SECONDS)
    process.call("alloc", nbytes=100 * MIB)
    assert settled(exporter, action)["still_free_bytes"] == 300 * MIB


def test_a_second_clear_ends_the_settling_time_of_the_first(exporter: ExporterProcess, process: TorchProcess) -> None:
    """Otherwise the second one would make it look as if the job had not reserved the memory again."""
    first = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=3600)
    process.call("free", numbers=[process.call("alloc", nbytes=400 * MIB)])
    second = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=SETTLE_SECONDS)
    assert settled(exporter, first)["still_free_bytes"] == 0
    assert settled(exporter, second)["still_free_bytes"] == 400 * MIB


def test_clear_on_a_terminal_waits_and_says_what_stayed_free(
    exporter: ExporterProcess, process: TorchProcess, tmp_path: Path
) -> None:
    command = (sys.executable, "-m", "gpumem_exporter", "clear", "--pid", str(process.pid), "--url", exporter.url)
    with training(process, tmp_path):
        wait_for(lambda: exporter.processes()[process.pid]["step"], "a step")
        shown = on_terminal(*command, "--settle", str(SETTLE_SECONDS))
    assert "Stays free 0 B" in shown
    assert f"400 MiB more was reserved again within {SETTLE_SECONDS:g} s." in shown
    piped = subprocess.run((*command, "--json"), capture_output=True, text=True, check=True, timeout=patient(60))
    assert json.loads(piped.stdout)["settle_seconds"] == 0


def on_terminal(*command: str) -> str:
    """Run a command on a terminal of 120 columns and return what it prints."""
    terminal, its_end = pty.openpty()
    with subprocess.Popen(command, stdout=its_end, env={**os.environ, "COLUMNS": "120", "TERM": "xterm"}) as running:
        os.close(its_end)
        pieces = []
        while True:
            try:
                piece = os.read(terminal, 65536)
            except OSError:  # EIO: the command has ended
                break
            pieces.append(piece)
        assert running.wait(patient(30)) == 0
    os.close(terminal)
    return b"".join(pieces).decode()
