"""What the exporter shows of an engine's memory: real tensors, a real graph and the real torch_memory_saver.

`tests/programs/served_model.py` has vLLM's names; tests/engines checks a real vLLM.
"""

from __future__ import annotations

import json
import platform
import subprocess

import pytest

from gpumem_client.wire.procfs import pid_namespace, start_time_ticks
from gpumem_client.wire.protocol import DeviceSample, EngineState
from tests.conftest import StartExporter
from tests.emulation.fixtures import StartTorch
from tests.emulation.node import CONTEXT_BYTES, GIB, MIB, EmulatedNode
from tests.emulation.torch_process import TorchProcess
from tests.support.builders.builders import report
from tests.support.processes.running_command import run_command
from tests.support.servers.engine_servers import engine_servers
from tests.support.servers.exporter_process import QUICK, ExporterProcess
from tests.support.truth.device_truth import scrape
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


METRICS = '# TYPE vllm:kv_cache_usage_perc gauge\nvllm:kv_cache_usage_perc{engine="0",model_name="chat"} 0.25\n'


def test_a_worker_has_the_use_that_the_server_above_it_shows(node: EmulatedNode, start_exporter: StartExporter) -> None:
    exporter = start_exporter(node, *QUICK)
    uuid = node.books().devices[0].uuid
    sample = DeviceSample(uuid, allocated_bytes=96 * MIB, component_bytes={"kv_cache": 64 * MIB, "other": 32 * MIB})
    sequence = 0

    def used(*pids: int) -> list[list[float]]:
        """Report for processes, and return what the exporter then shows."""
        nonlocal sequence
        sequence += 1
        for pid in pids:
            ticks = start_time_ticks(f"/proc/{pid}")
            changes = {"start_time_ticks": ticks, "pid_namespace": pid_namespace(), "session_started_seconds": 0.0}
            sent = report(pid, devices=(sample,), sequence=sequence, engine=EngineState("vllm"), **changes)
            exporter.report(sent)
        metrics = exporter.metrics()
        return [metrics.values("gpumem_engine_kv_cache_bytes", pid=str(pid), state="used") for pid in pids]

    with engine_servers() as serve, subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        served = serve("vllm", {"GET /metrics": [200, METRICS]}, "serve", "model", "--tensor-parallel-size", "2")
        # The other process has the same user, and reports and is searched first, but is not below the server.
        wait_until_equal(lambda: used(other.pid, served.worker), [[], [16.0 * MIB]], "the use of the cache")
        assert [request[:2] for request in served.requests(1)] == [("GET", "/metrics")]


SLEEPING = """
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
with saver.region(tag="weights", enable_cpu_backup=False):
    weights = torch.empty(weights_bytes, dtype=torch.uint8, device="cuda")
rest = torch.empty(rest_bytes, dtype=torch.uint8, device="cuda")
"""
SERIES = (
    "gpumem_torch_allocated_bytes",
    "gpumem_torch_reserved_bytes",
    "gpumem_torch_fragmented_bytes",
    "gpumem_torch_unmapped_bytes",
    "gpumem_process_memory_used_bytes",
    "gpumem_torch_non_torch_bytes",
)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="torch_memory_saver has wheels for x86-64 only")
def test_memory_of_a_sleeping_engine_is_unmapped(exporter: ExporterProcess, start_torch: StartTorch) -> None:
    process = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    weights, rest, cached = 5 * GIB, 256 * MIB, 512 * MIB
    process.exec(SLEEPING, weights_bytes=weights, rest_bytes=rest)
    process.call("start_client", workload="engine")

    def values() -> tuple[list[float], ...]:
        metrics = scrape(exporter)  # whose ledger adds up
        found = tuple(metrics.values(name, pid=str(process.pid)) for name in SERIES)
        assert found[-1] in ([], [CONTEXT_BYTES]), found
        return found

    def wait(*, held: int, unmapped: int, cached: int = 0) -> None:
        reserved = held + cached
        expected = (held, reserved, 0, unmapped, reserved + CONTEXT_BYTES, CONTEXT_BYTES)
        wait_until_equal(values, tuple([value] for value in expected), "the values", 30.0)

    wait(held=weights + rest, unmapped=0)

    process.exec("saver.pause('weights')")
    wait(held=rest, unmapped=weights)
    assert process.exec("result = torch.cuda.memory_reserved()") == weights + rest
    process.exec("torch.empty(nbytes, dtype=torch.uint8, device='cuda')", nbytes=cached)
    wait(held=rest, cached=cached, unmapped=weights)
    cleared = run_command("clear", "--all", "--yes", "--settle", "0.1", "--json", "--url", exporter.url)
    (result,) = json.loads(cleared.stdout)["results"]
    assert (result["reserved_before_bytes"], result["reserved_after_bytes"]) == (rest + cached, rest)
    assert (result["allocated_before_bytes"], result["allocated_after_bytes"]) == (rest, rest)
    assert (result["freed_bytes"], result["still_free_bytes"]) == (cached, cached)
    wait(held=rest, unmapped=weights)

    other = start_torch(GPUMEM_EXPORTER_URL=exporter.url)
    number = other.call("alloc", nbytes=4 * GIB)
    wait(held=rest, unmapped=weights)
    other.call("free", numbers=[number])
    other.call("empty_cache")
    process.exec("saver.resume('weights')")
    wait(held=weights + rest, unmapped=0)
