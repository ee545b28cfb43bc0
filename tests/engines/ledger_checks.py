"""What the exporter shows of a real vLLM: components, key-value cache, and sleep mode."""

from __future__ import annotations

import os
import re
import signal
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.emulation.fixtures import StartTorch
from tests.emulation.node import GIB, MIB, EmulatedNode
from tests.engines.conftest import StartVllm
from tests.engines.servers import MODEL, Vllm, vllm_environment
from tests.support.servers.exporter_process import ExporterProcess
from tests.support.waiting import wait_until_equal

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

CONTEXT = 512 * MIB
LAYERS, KV_HEADS, HEAD_SIZE, ITEM_BYTES, BLOCK_TOKENS = 4, 4, 64, 2, 16
TOKEN_BYTES = 2 * LAYERS * KV_HEADS * HEAD_SIZE * ITEM_BYTES
"""A key and a value."""
SEGMENT_ROUNDING = 2 * MIB
"""A segment is at most this much larger than its blocks, and a block of a large segment by less than 1 MiB than its
tensor."""
SECONDS = 60.0


def sample(exporter: ExporterProcess) -> Mapping[str, Any]:
    """Return the device of the only process; empty before its first report."""
    for process in exporter.get("/api/v1/processes")["processes"]:
        for device in process["devices"]:
            if device["allocated_bytes"] is not None:
                return dict(device)
    return {}


def parts(exporter: ExporterProcess) -> tuple[set[str], set[str]]:
    """Return the components with memory and those without, after a check that the values add up.

    The driver's value is read at another time than the process's, so the caller repeats this.
    """
    values = sample(exporter)
    if not values:
        return set(), set()
    mapped, unmapped = values["component_bytes"], values["component_unmapped_bytes"]
    assert sum(mapped.values()) == (values["allocated_bytes"] if mapped else 0), values
    assert sum(unmapped.values()) == (values["unmapped_bytes"] or 0 if unmapped else 0), values
    cache = values["kv_cache_bytes"]
    assert sum(cache.values()) == (mapped["kv_cache"] if cache else 0), values
    return {name for name, size in mapped.items() if size}, set(unmapped)


def wait_for_parts(exporter: ExporterProcess, mapped: set[str], unmapped: set[str]) -> Mapping[str, Any]:
    """Wait for these components, and until non-torch memory is the context; return the sample."""
    wait_until_equal(lambda: parts(exporter), (mapped, unmapped), "the components", SECONDS)
    wait_until_equal(lambda: sample(exporter)["non_torch_bytes"], CONTEXT, "the ledger", SECONDS)
    exporter.metrics().assert_ledgers_add_up()
    return sample(exporter)


def scraped_meanwhile(exporter: ExporterProcess, action: Callable[[], object]) -> None:
    """Run an action in a thread, and check meanwhile that each scrape and each sample adds up."""
    thread = threading.Thread(target=action)
    thread.start()
    while thread.is_alive():
        exporter.metrics().assert_ledgers_add_up()
        parts(exporter)
        thread.join(timeout=0.05)


def label(vllm: Vllm, name: str) -> str:
    """Return a label of vLLM's own `vllm:cache_config_info`."""
    _, page = vllm.request("GET", "/metrics")
    (line,) = re.findall(r"^vllm:cache_config_info{.*$", page, re.MULTILINE)
    (value,) = re.findall(rf'\b{name}="([^"]*)"', line)
    return str(value)


def logged(vllm: Vllm, pattern: str) -> str:
    found = re.search(pattern, vllm.log())
    assert found is not None, vllm.log()[-8000:]
    return found[1]


def test_a_server_shows_its_weights_and_its_cache_as_its_log_and_its_metrics_do(
    exporter: ExporterProcess, start_vllm: StartVllm
) -> None:
    vllm = start_vllm()
    vllm.wait()
    values = wait_for_parts(exporter, {"weights", "kv_cache", "other"}, set())
    components = values["component_bytes"]
    tokens = int(logged(vllm, r"GPU KV cache size: ([\d,]+) tokens").replace(",", ""))
    assert components["kv_cache"] == tokens * TOKEN_BYTES
    assert components["kv_cache"] == int(label(vllm, "num_gpu_blocks")) * BLOCK_TOKENS * TOKEN_BYTES
    assert f"{components['weights'] / GIB:.2f}" == logged(vllm, r"Model loading took ([\d.]+) GiB")
    assert values["kv_cache_bytes"] == {"used": 0, "evictable": 0, "free": components["kv_cache"]}


def test_the_ledger_is_exact_while_a_server_sleeps_wakes_and_is_killed(
    node: EmulatedNode, exporter: ExporterProcess, start_vllm: StartVllm
) -> None:
    vllm = start_vllm("--enable-sleep-mode", VLLM_SERVER_DEV_MODE="1")

    def post(path: str) -> None:
        scraped_meanwhile(exporter, lambda: vllm.request("POST", path))

    vllm.wait()
    everything = {"weights", "kv_cache", "runtime"}
    awake = wait_for_parts(exporter, everything | {"other"}, set())
    blocks = int(label(vllm, "num_gpu_blocks"))
    assert 0 <= awake["component_bytes"]["kv_cache"] - blocks * BLOCK_TOKENS * TOKEN_BYTES < LAYERS * MIB
    for level in (1, 2):
        post(f"/sleep?level={level}")
        asleep = wait_for_parts(exporter, {"other"}, everything)
        for name in everything:
            tensors, segments = awake["component_bytes"][name], asleep["component_unmapped_bytes"][name]
            assert tensors <= segments <= tensors + LAYERS * SEGMENT_ROUNDING, name
        assert asleep["kv_cache_bytes"] == {}
        if level == 1:
            post("/wake_up?tags=weights")
            partly = wait_for_parts(exporter, {"weights", "runtime", "other"}, {"kv_cache"})
            assert partly["component_bytes"]["weights"] == awake["component_bytes"]["weights"]
        post("/wake_up")
        woken = wait_for_parts(exporter, everything | {"other"}, set())
        assert woken["component_bytes"] == awake["component_bytes"]
    post("/sleep?level=1")
    wait_for_parts(exporter, {"other"}, everything)
    os.killpg(vllm.popen.pid, signal.SIGKILL)
    wait_until_equal(lambda: exporter.get("/api/v1/processes")["processes"], [], "the end", SECONDS)
    wait_until_equal(lambda: node.books()[0].processes, {}, "the end on the device", SECONDS)
    exporter.metrics().assert_ledgers_add_up()


LLM = """
# With CUDA graphs, without what is compiled on the device.
from vllm import LLM
llm = LLM(
    model=model, load_format="dummy", skip_tokenizer_init=True, max_model_len=256, gpu_memory_utilization=0.2,
    enable_sleep_mode=True, sleep_mode_offload_cudagraph=True,
    compilation_config={"mode": 0, "cudagraph_mode": "FULL", "cudagraph_capture_sizes": [1, 2]},
    kernel_config={"enable_jit_warmup": False, "enable_flashinfer_autotune": False},
)
core = llm.llm_engine.engine_core.engine_core
pool = core.scheduler.kv_cache_manager.block_pool
result = pool.num_gpu_blocks
"""
STATE = """
from gpumem_client.engines.engine_reader import process_engine
facts = process_engine().read()
result = [facts.name, facts.version, facts.model, facts.measures, facts.ready, facts.requests]
"""


def test_an_engine_in_the_program_sleeps_releases_its_cache_and_shows_its_blocks(
    exporter: ExporterProcess, start_torch: StartTorch, tmp_path: Path
) -> None:
    process = start_torch(
        GPUMEM_EXPORTER_URL=exporter.url, VLLM_ENABLE_V1_MULTIPROCESSING="0", **vllm_environment(tmp_path)
    )
    process.call("start_client", workload="engine")
    blocks = process.exec(LLM, timeout_seconds=400, model=str(MODEL))
    name, version, model, measures, ready, requests = process.exec(STATE)
    assert (name, model, measures, ready, requests) == ("vllm", str(MODEL), False, True, 0)
    assert version == process.exec("import vllm; result = vllm.__version__")

    everything = {"weights", "kv_cache", "runtime"}
    awake = wait_for_parts(exporter, everything | {"other"}, set())["component_bytes"]
    assert 0 <= awake["kv_cache"] - blocks * BLOCK_TOKENS * TOKEN_BYTES < LAYERS * MIB
    assert awake["cuda_graphs"] == 0, "their pool is known, and has no live tensor between two replays"
    taken = 1000
    process.exec("blocks = pool.get_new_blocks(taken)", taken=taken)

    def states(used: int, evictable: int) -> dict[str, int]:
        sizes = [round(awake["kv_cache"] * (count / (blocks - 1))) for count in (used, evictable)]
        return {"used": sizes[0], "evictable": sizes[1], "free": awake["kv_cache"] - sum(sizes)}

    wait_until_equal(lambda: sample(exporter)["kv_cache_bytes"], states(taken, 0), "the used blocks", SECONDS)
    hash_blocks = (
        "for i, each in enumerate(blocks): pool._insert_block_hash(i.to_bytes(36, 'big'), each, num_tokens=16)"
    )
    process.exec(f"{hash_blocks}\npool.free_blocks(blocks)")
    wait_until_equal(lambda: sample(exporter)["kv_cache_bytes"], states(0, taken), "the evictable blocks", SECONDS)

    process.exec("llm.sleep(1)")
    wait_for_parts(exporter, {"other"}, everything | {"cuda_graphs"})
    process.exec("llm.wake_up()")
    wait_for_parts(exporter, everything | {"other"}, set())
    process.exec("core.pause_scheduler(mode='abort')\ncore.release_kv_cache_memory()")
    wait_for_parts(exporter, {"weights", "runtime", "other"}, {"kv_cache"})
