"""What the exporter shows of an engine's memory: real tensors, a real graph and the real torch_memory_saver.

`tests/programs/served_model.py` has vLLM's names; tests/engines checks a real vLLM.
"""

from __future__ import annotations

import platform

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_until_equal

SAVER = """
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
with saver.region(tag="kv_cache", enable_cpu_backup=False):
    later = torch.empty(size, dtype=torch.uint8, device="cuda")
"""
WEIGHTS, CACHE, ACTIVATIONS, GRAPHS = 2 * GIB, 1 * GIB, 96 * MIB, 32 * MIB
OTHER = ACTIVATIONS + 512  # the allocator rounds the odd byte of the weights up
STATES = {"used": CACHE // 2, "evictable": CACHE // 4, "free": CACHE // 4}
FIELDS = ("component_bytes", "component_unmapped_bytes", "kv_cache_bytes")


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.fixture
def engine(exporter: ExporterProcess, start_torch: StartTorch) -> TorchProcess:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="engine")
    sizes = {"weights_bytes": WEIGHTS, "cache_bytes": [CACHE // 4, 3 * CACHE // 4], "activations_bytes": ACTIVATIONS}
    process.call_program("served_model", "serve", **sizes, blocks=[1, 1, 0, -1])
    return process


def shown(exporter: ExporterProcess) -> tuple[dict[str, int], ...]:
    """Return the fields of the only process, after a check that its components add up."""
    for process in exporter.get("/api/v1/processes")["processes"]:
        for device in process["devices"]:
            components: dict[str, int] = device["component_bytes"]
            assert sum(components.values()) == (device["allocated_bytes"] if components else 0), device
            return tuple(device[name] for name in FIELDS)
    return ()


def test_the_memory_of_an_engine_is_split_to_the_byte(exporter: ExporterProcess, engine: TorchProcess) -> None:
    components = {"weights": WEIGHTS, "kv_cache": CACHE, "other": OTHER}
    wait_until_equal(lambda: shown(exporter), (components, {}, STATES), "the components")
    engine.call_program("served_model", "capture", nbytes=GRAPHS)
    components["cuda_graphs"] = GRAPHS
    wait_until_equal(lambda: shown(exporter), (components, {}, STATES), "the graph")
    if platform.machine() == "x86_64":  # torch_memory_saver has wheels for no other
        engine.exec(SAVER, size=GIB)
        components["other"] += GIB
        wait_until_equal(lambda: shown(exporter), (components, {}, STATES), "more memory")
        engine.exec("saver.pause('kv_cache')")
        wait_until_equal(lambda: shown(exporter), ({}, {}, {}), "the pause: which components are paused is unknown")
        engine.exec("saver.resume('kv_cache')")
        wait_until_equal(lambda: shown(exporter), (components, {}, STATES), "the end of the pause")
    engine.call_program("served_model", "end")
    wait_until_equal(lambda: shown(exporter), ({}, {}, {}), "the end of the engine")
