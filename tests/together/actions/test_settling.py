"""What stays free after a clear, with real torch on the emulated node."""

from __future__ import annotations

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
from tests.support.waiting import wait_for

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


def test_a_second_clear_ends_the_settling_time_of_the_first(exporter: ExporterProcess, process: TorchProcess) -> None:
    """Otherwise the second one would make it look as if the job had not reserved the memory again."""
    first = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=3600)
    process.call("free", numbers=[process.call("alloc", nbytes=400 * MIB)])
    second = exporter.act("empty_cache", target={"pid": process.pid}, settle_seconds=SETTLE_SECONDS)
    assert settled(exporter, first)["still_free_bytes"] == 0
    assert settled(exporter, second)["still_free_bytes"] == 400 * MIB
