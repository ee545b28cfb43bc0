"""What the exporter shows of an engine's memory: real tensors, a real graph and the real torch_memory_saver.

The engine's classes have vLLM's names; tests/engines checks a real vLLM.
"""

from __future__ import annotations

import platform
from typing import Any

import pytest

from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.waiting import wait_until_equal

ENGINE = """
import sys, threading, types

def module(name, **names):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(names)

class Worker:
    available_kv_cache_memory_bytes = 1
    vllm_config = types.SimpleNamespace(model_config=types.SimpleNamespace(served_model_name="chat"))

class EngineCore:
    def run_busy_loop(self):
        stop.wait()

def empty(nbytes):
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")

module("vllm", __version__="0.32.0")
module("vllm.v1.worker.gpu_worker", Worker=Worker)
module("vllm.v1.engine.core", EngineCore=EngineCore, EngineCoreProc=EngineCore)
stop, worker, core = threading.Event(), Worker(), EngineCore()
weights = empty(weights_bytes + 1)
cache = [empty(cache_bytes), empty(cache_bytes)]
cache.append(cache[0].view(2, -1))
activations = empty(activations_bytes)
worker.model_runner = types.SimpleNamespace(model_memory_usage=weights_bytes, kv_caches=cache)
worker.device = torch.device("cuda", 0)
block = lambda uses: types.SimpleNamespace(ref_cnt=uses, block_hash=b"" if uses < 2 else None)
blocks = [block(uses) for uses in (0, 2, 0, 0, 2)]
pool = types.SimpleNamespace(
    blocks=blocks, num_gpu_blocks=5, enable_caching=True, cached_block_hash_to_block={},
    free_block_queue=types.SimpleNamespace(num_free_blocks=2),
)
core.scheduler = types.SimpleNamespace(requests={}, kv_cache_manager=types.SimpleNamespace(block_pool=pool))
core.model_executor = types.SimpleNamespace(driver_worker=types.SimpleNamespace(worker=worker))
threading.Thread(target=core.run_busy_loop, daemon=True).start()
"""
GRAPH = """
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, pool=torch.cuda.graph_pool_handle()):
    output = empty(graph_bytes)
"""
SAVER = """
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
with saver.region(tag="kv_cache", enable_cpu_backup=False):
    later = empty(cache_bytes)
"""
WEIGHTS, CACHE, ACTIVATIONS, GRAPHS = 2 * GIB, 512 * MIB, 96 * MIB, 32 * MIB
FIELDS = ("component_bytes", "component_unmapped_bytes", "kv_cache_bytes")


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK)


@pytest.fixture
def engine(exporter: ExporterProcess, start_torch: StartTorch) -> TorchProcess:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    process.call("start_client", workload="engine")
    process.exec(ENGINE, weights_bytes=WEIGHTS, cache_bytes=CACHE, activations_bytes=ACTIVATIONS)
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
    # The allocator rounds the odd byte of the weights up to 512.
    components: dict[str, Any] = {"weights": WEIGHTS, "kv_cache": 2 * CACHE, "other": ACTIVATIONS + 512}
    states = {"used": CACHE, "evictable": CACHE, "free": 0}
    wait_until_equal(lambda: shown(exporter), (components, {}, states), "the components")
    engine.exec(GRAPH, graph_bytes=GRAPHS)
    components["cuda_graphs"] = GRAPHS
    wait_until_equal(lambda: shown(exporter), (components, {}, states), "the graph")
    engine.exec("del core, worker, cache, pool; stop.set()")
    wait_until_equal(lambda: shown(exporter), ({}, {}, {}), "the end of the engine")


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch_memory_saver has wheels for x86-64 only")
def test_which_components_are_paused_is_unknown(exporter: ExporterProcess, engine: TorchProcess) -> None:
    engine.exec(SAVER)
    components = {"weights": WEIGHTS, "kv_cache": 2 * CACHE, "other": ACTIVATIONS + 512 + CACHE}
    states = {"used": CACHE, "evictable": CACHE, "free": 0}
    wait_until_equal(lambda: shown(exporter), (components, {}, states), "the components")
    engine.exec("saver.pause('kv_cache')")
    wait_until_equal(lambda: shown(exporter), ({}, {}, {}), "the pause")
    engine.exec("saver.resume('kv_cache')")
    wait_until_equal(lambda: shown(exporter), (components, {}, states), "the end of the pause")
