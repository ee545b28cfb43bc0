"""Memory that PyTorch counts and the driver does not hold, with real libraries on the emulated node.

`tests/engines` checks the sleep of a real vLLM.
"""

from __future__ import annotations

import json
import platform
from itertools import pairwise

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import CONTEXT_BYTES, GIB, MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.device_truth import scrape
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.running_command import run_command
from tests.support.waiting import wait_until_equal

CONTEXT = CONTEXT_BYTES
WEIGHTS, OTHER, CACHED = 5 * GIB, 256 * MIB, 512 * MIB

SAVER = """
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
with saver.region(tag="weights", enable_cpu_backup=False):
    weights = torch.empty(weights_bytes, dtype=torch.uint8, device="cuda")
rest = torch.empty(other_bytes, dtype=torch.uint8, device="cuda")
"""
SECONDS = 30.0
SERIES = (
    "gpumem_torch_allocated_bytes",
    "gpumem_torch_reserved_bytes",
    "gpumem_torch_fragmented_bytes",
    "gpumem_torch_unmapped_bytes",
    "gpumem_process_memory_used_bytes",
    "gpumem_torch_non_torch_bytes",
)


class Engine:
    """A process that can sleep, and its values."""

    def __init__(self, exporter: ExporterProcess, process: TorchProcess) -> None:
        self.exporter = exporter
        self.process = process

    def values(self) -> dict[str, float | None]:
        """Return the values of one scrape, in which the ledger adds up and non-torch memory is the context."""
        metrics = scrape(self.exporter)
        found = {name: metrics.values(name, pid=str(self.process.pid)) for name in SERIES}
        non_torch = found["gpumem_torch_non_torch_bytes"]
        assert non_torch in ([], [CONTEXT]), found
        return {name: values[0] if values else None for name, values in found.items()}

    def wait(self, *, held: int, unmapped: int | None, cached: int = 0) -> None:
        reserved = held + cached
        expected = (held, reserved, 0, unmapped, reserved + CONTEXT, CONTEXT)
        wait_until_equal(self.values, dict(zip(SERIES, expected, strict=True)), "the values", SECONDS)


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch_memory_saver has wheels for x86-64 only")
def test_memory_of_a_sleeping_engine_is_unmapped(exporter: ExporterProcess, start_torch: StartTorch) -> None:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.exec(SAVER, weights_bytes=WEIGHTS, other_bytes=OTHER)
    process.call("start_client", workload="engine")
    engine = Engine(exporter, process)
    engine.wait(held=WEIGHTS + OTHER, unmapped=0)

    process.exec("saver.pause('weights')")
    engine.wait(held=OTHER, unmapped=WEIGHTS)
    assert process.exec("result = torch.cuda.memory_reserved()") == WEIGHTS + OTHER
    lines = run_command("info", "--url", exporter.url).stdout.splitlines()
    heading, row = next((above, line) for above, line in pairwise(lines) if line.startswith("engine "))
    assert row[: heading.index("Unmapped") + len("Unmapped")].endswith(" 5.0G")

    process.exec(
        "cached = torch.empty(cached_bytes, dtype=torch.uint8, device='cuda'); del cached", cached_bytes=CACHED
    )
    engine.wait(held=OTHER, cached=CACHED, unmapped=WEIGHTS)
    cleared = run_command("clear", "--all", "--yes", "--settle", "0.1", "--json", "--url", exporter.url)
    (result,) = json.loads(cleared.stdout)["results"]
    assert (result["reserved_before_bytes"], result["reserved_after_bytes"]) == (OTHER + CACHED, OTHER)
    assert (result["allocated_before_bytes"], result["allocated_after_bytes"]) == (OTHER, OTHER)
    assert (result["freed_bytes"], result["still_free_bytes"]) == (CACHED, CACHED)
    engine.wait(held=OTHER, unmapped=WEIGHTS)

    other = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    number = other.call("alloc", nbytes=4 * GIB)
    engine.wait(held=OTHER, unmapped=WEIGHTS)
    other.call("free", numbers=[number])
    other.call("empty_cache")
    process.exec("saver.resume('weights')")
    engine.wait(held=WEIGHTS + OTHER, unmapped=0)
