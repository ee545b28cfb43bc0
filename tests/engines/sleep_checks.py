"""A real vLLM sleeps and wakes by the exporter's actions.

The first check runs the loop, the queue and the calls of vLLM's own `EngineCoreProc` with a scheduler and an executor
that do nothing. The others are `vllm serve` on the emulated node. pytest collects the file only if it is named.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client.engines.sleep import CoreMemory
from gpumem_client.engines.vllm import Vllm as VllmObjects
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.reason_codes import ReasonCode
from tests.conftest import StartExporter
from tests.emulation.node import MIB, EmulatedNode
from tests.engines.conftest import StartVllm
from tests.engines.servers import START_SECONDS, TITLE, Vllm
from tests.support.exporter_process import QUICK, ExporterProcess
from tests.support.running_command import run_command
from tests.support.waiting import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def core() -> Iterator[Any]:
    """vLLM's own core in its loop, without a model."""
    engine = pytest.importorskip("vllm.v1.engine.core")
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.engine import EngineCoreRequestType

    class Scheduler:
        requests = 0
        pause_state = PauseState.UNPAUSED

        def has_requests(self) -> bool:
            return self.requests > 0

        def set_pause_state(self, state: Any) -> None:
            self.pause_state = state

        def finish_requests(self, _ids: Any, _status: Any) -> list[Any]:
            self.requests = 0
            return []

        def get_num_unfinished_requests(self) -> int:
            return self.requests

    class Executor(engine.Executor):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            self.sleeping_tags: set[str] = set()
            self.calls: list[str] = []

        def _init_executor(self) -> None: ...
        def check_health(self) -> None: ...
        def collective_rpc(self, name: str, *_: Any, **__: Any) -> list[Any]:
            self.calls.append(name)
            return []

    core = engine.EngineCoreProc.__new__(engine.EngineCoreProc)
    vars(core).update(
        input_queue=queue.Queue(),
        output_queue=queue.Queue(),
        aborts_queue=queue.Queue(),
        engines_running=False,
        enable_fault_tolerance=False,
        shutdown_state=engine.EngineShutdownState.RUNNING,
        process_input_queue_block=True,
        publish_dp_lb_stats=False,
        batch_queue=None,
        _idle_state_callbacks=[],
        scheduler=Scheduler(),
        model_executor=Executor(),
        reset_prefix_cache=lambda **_: True,
        reset_mm_cache=lambda: None,
        reset_encoder_cache=lambda: None,
        vllm_config=SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True), shutdown_timeout=0),
        step_fn=lambda: (None, False),
        post_step=lambda _: None,
    )

    def run() -> None:
        with pytest.raises(SystemExit):
            core.run_busy_loop()

    thread = threading.Thread(target=run)
    thread.start()
    yield core
    core.shutdown_state = engine.EngineShutdownState.REQUESTED
    core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
    thread.join()


def test_vllms_own_loop_sleeps_and_wakes_and_answers_no_client(core: Any) -> None:
    found = VllmObjects()
    wait_for(lambda: found._objects.search() or found.core() is core, "the core on a stack")
    assert CoreMemory.is_supported(core)
    memory, executor, scheduler = CoreMemory(core), core.model_executor, core.scheduler
    memory.release(keep_weights=False, force=False)
    assert (core.is_sleeping(), executor.sleeping_tags) == (True, {"weights", "kv_cache"})
    scheduler.requests = 1  # arrives while it sleeps, and waits
    memory.resume()
    assert (core.is_sleeping(), scheduler.requests) == (False, 1)
    with pytest.raises(CommandRefusedError) as refused:
        memory.release(keep_weights=True, force=False)
    assert (refused.value.reason_code, scheduler.requests) == (ReasonCode.ENGINE_BUSY, 1)
    memory.release(keep_weights=True, force=True)
    assert (executor.sleeping_tags, scheduler.requests) == ({"kv_cache"}, 0)
    memory.resume()
    assert [call for call in executor.calls if call in ("sleep", "wake_up", "discard")] == [
        *("sleep", "wake_up", "discard", "wake_up")
    ]
    assert core.output_queue.empty()


@pytest.fixture
def exporter(node: EmulatedNode, start_exporter: StartExporter) -> ExporterProcess:
    return start_exporter(node, *QUICK, "--action.allow", "default,release_memory,resume_memory")


def test_a_server_sleeps_and_wakes_without_development_mode(
    node: EmulatedNode, exporter: ExporterProcess, start_vllm: StartVllm
) -> None:
    vllm = start_vllm("--enable-sleep-mode")
    wait_for(vllm.serves, "vLLM", START_SECONDS)
    wait_for(lambda: "release_memory" in str(exporter.get("/api/v1/processes")), "the engine in its process")
    (pid,) = exporter.processes()
    before = node.books().used_by(pid)
    slept = run_command("sleep", "--workload", "engine", "--wait-idle", "30", "--json", "--url", exporter.url)
    assert slept.returncode == 0, slept.stdout
    (result,) = json.loads(slept.stdout)["results"]
    after = node.books().used_by(pid)
    assert (result["driver_before_bytes"], result["driver_after_bytes"]) == (before, after)
    assert result["freed_bytes"] == before - after > 1000 * MIB
    woken = run_command("wake", "--workload", "engine", "--json", "--url", exporter.url)
    assert woken.returncode == 0, woken.stdout
    awake = node.books().used_by(pid)
    assert after + 1000 * MIB < awake <= before  # sleeping has also released the idle cache
    assert json.loads(woken.stdout)["results"][0]["driver_after_bytes"] == awake
    assert vllm.serves()


def test_a_server_without_a_reporter_sleeps_and_wakes_through_its_development_routes(
    node: EmulatedNode, exporter: ExporterProcess, tmp_path: Path
) -> None:
    vllm = Vllm(node, tmp_path, (), ("--enable-sleep-mode",), VLLM_SERVER_DEV_MODE="1")
    try:
        wait_for(vllm.serves, "vLLM", START_SECONDS)
        listed = "/api/v1/processes"
        wait_for(lambda: TITLE in [each["command"] for each in exporter.get(listed)["processes"]], "the engine")
        (pid,) = [each["pid"] for each in exporter.get(listed)["processes"] if each["command"] == TITLE]
        before = node.books().used_by(pid)
        slept = run_command("sleep", "--pid", str(pid), "--keep", "weights", "--json", "--url", exporter.url)
        assert slept.returncode == 0, slept.stdout
        assert json.loads(slept.stdout)["freed_bytes"] == before - node.books().used_by(pid) > 1000 * MIB
        again = run_command("sleep", "--pid", str(pid), "--json", "--url", exporter.url)
        assert json.loads(again.stdout)["results"][0]["reason_code"] == "engine_asleep"
        woken = run_command("wake", "--pid", str(pid), "--json", "--url", exporter.url)
        assert woken.returncode == 0, woken.stdout
        assert before - 64 * MIB < node.books().used_by(pid) <= before
    finally:
        vllm.close()
