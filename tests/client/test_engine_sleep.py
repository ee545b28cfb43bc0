"""An engine core releases and resumes its memory in its own loop: a fake with the queue and the calls of vLLM 0.32.0.

tests/engines/sleep_checks.py does the same with vLLM's own classes.
"""

from __future__ import annotations

import enum
import functools
import queue
import sys
import threading
import types
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client.engines import sleep
from gpumem_client.engines.sleep import CoreMemory, host_available_bytes
from gpumem_client.wire.errors import CommandRefusedError
from gpumem_client.wire.protocol import CommandResult
from gpumem_client.wire.reason_codes import ReasonCode
from tests.support.builders.fake_allocator import CommandBench
from tests.support.waiting import patient, wait_for

MIB = 1 << 20


class EngineCoreRequestType(enum.Enum):
    UTILITY = b"\x03"


class Core:
    """`vllm.v1.engine.core.EngineCoreProc` with a thread that runs its loop."""

    def __init__(self) -> None:
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.answers: list[Any] = []
        self.requests = 0
        self.asleep: set[str] = set()
        self.calls: list[Any] = []
        self.stuck = threading.Event()
        self.stuck.set()
        self.error: Exception | None = None
        self.handled: Callable[[], object] = lambda: None
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(enable_sleep_mode=True))
        self.thread = threading.Thread(target=self.run_busy_loop, daemon=True)
        self.thread.start()

    def run_busy_loop(self) -> None:
        while (request := self.input_queue.get()) is not None:
            self.stuck.wait(30)
            _, (_, call_id, name, arguments) = request
            call = functools.partial(getattr(self, name), *arguments)
            self._invoke_utility_method(name, call, call_id, self.answers.append)
            self.handled()

    @staticmethod
    def _invoke_utility_method(name: str, get_result: Any, output: Any, enqueue_output: Any) -> None:
        result = get_result()  # vLLM catches an error, and answers with it
        if isinstance(result, Future):
            result.add_done_callback(lambda _: enqueue_output((name, output)))
        else:
            enqueue_output((name, output))

    def is_running(self) -> bool:
        return self.thread.is_alive()

    def has_work(self) -> bool:
        return self.requests > 0

    def is_sleeping(self) -> bool:
        return bool(self.asleep)

    def sleep(self, level: int = 1, mode: str = "abort") -> Any:
        assert threading.current_thread() is self.thread
        self.calls.append(("sleep", level, mode))
        if self.error is not None:
            raise self.error
        if mode == "abort":
            self.requests = 0
        self.asleep |= {"paused"} if level == 0 else {"weights", "kv_cache"}
        if mode == "wait":
            return None
        done: Future[None] = Future()  # as after an abort with a batch in flight
        threading.Timer(0.05, done.set_result, [None]).start()
        return done

    def release_kv_cache_memory(self) -> None:
        self.calls.append("release_kv_cache_memory")
        if self.error is not None:
            raise self.error
        self.asleep = {"kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> bool:
        self.calls.append(("wake_up", tags))
        self.asleep.clear()
        return True


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[Core]:
    module = types.ModuleType("vllm.v1.engine")
    vars(module)["EngineCoreRequestType"] = EngineCoreRequestType
    monkeypatch.setitem(sys.modules, "vllm.v1.engine", module)
    core = Core()
    yield core
    core.stuck.set()
    core.input_queue.put(None)
    core.thread.join()
    assert core.answers == []  # no client of vLLM gets an answer to a question that it did not ask
    assert not [name for name in vars(core) if "gpumem" in name]


def refused(call: Callable[[], None], code: ReasonCode) -> None:
    with pytest.raises(CommandRefusedError) as caught:
        call()
    assert caught.value.reason_code == code


def test_it_sleeps_and_wakes_in_the_loop_of_the_engine(core: Core) -> None:
    assert CoreMemory.is_supported(core)
    memory = CoreMemory(core)
    memory.release(keep_weights=False, force=False)
    refused(lambda: memory.release(keep_weights=False, force=False), ReasonCode.ENGINE_ASLEEP)
    memory.resume()
    refused(memory.resume, ReasonCode.ENGINE_AWAKE)
    memory.release(keep_weights=True, force=False)
    assert core.asleep == {"kv_cache"}
    assert core.calls == [
        *(("sleep", 1, "wait"), ("wake_up", None), ("sleep", 0, "wait"), "release_kv_cache_memory"),
    ]


def test_requests_are_aborted_only_with_force(core: Core) -> None:
    core.requests, memory = 3, CoreMemory(core)
    assert memory.busy
    refused(lambda: memory.release(keep_weights=False, force=False), ReasonCode.ENGINE_BUSY)
    assert (core.requests, core.asleep) == (3, set())
    memory.release(keep_weights=False, force=True)
    assert (core.requests, core.calls) == (0, [("sleep", 1, "abort")])


def test_an_error_of_the_engine_is_the_result_and_its_loop_goes_on(core: Core) -> None:
    memory, core.error = CoreMemory(core), RuntimeError("Memory usage increased after sleeping.")
    with pytest.raises(RuntimeError, match="increased"):
        memory.release(keep_weights=False, force=False)
    setattr(core, "sleep", lambda level, mode: core.asleep.add("paused"))  # noqa: B010 - for mypy
    with pytest.raises(RuntimeError, match="increased"):
        memory.release(keep_weights=True, force=False)
    assert (core.asleep, core.thread.is_alive()) == (set(), True)  # its requests do not wait forever


def test_a_request_that_was_refused_is_in_the_queue_before_the_next_one(
    core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sleep, "_START_SECONDS", 0.05)
    core.stuck.clear()
    memory = CoreMemory(core)
    refused(lambda: memory.release(keep_weights=False, force=False), ReasonCode.ENGINE_BUSY)
    monkeypatch.setattr(sleep, "_START_SECONDS", patient(30))
    asked = threading.Thread(target=lambda: memory.release(keep_weights=False, force=False))
    core.handled = lambda: asked.join(patient(30)) if core.calls else None
    asked.start()
    wait_for(lambda: core.input_queue.qsize() == 1, "the second request")  # the loop has the first one
    core.stuck.set()
    asked.join(patient(30))
    wait_for(core.input_queue.empty, "the loop")
    assert core.calls == [("sleep", 1, "wait")]
    assert core.thread.is_alive()


def test_an_engine_without_sleep_mode_or_of_another_version_is_left_alone(core: Core) -> None:
    core.vllm_config.model_config.enable_sleep_mode = False
    refused(lambda: CoreMemory(core).release(keep_weights=False, force=False), ReasonCode.ENGINE_NOT_ENABLED)
    assert not CoreMemory.is_supported(object())

    class Answering(Core):
        """A core that answers at once whatever the method returns."""

        @staticmethod
        def _invoke_utility_method(name: str, result: Any) -> None: ...  # type: ignore[override]

    assert not CoreMemory.is_supported(Answering.__new__(Answering))
    core.dp_group = object()  # type: ignore[attr-defined]
    assert not CoreMemory.is_supported(core)


def test_the_host_must_have_the_memory_of_the_weights(core: Core, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = SimpleNamespace(tag="weights", handle=(0, 1 << 60))
    monkeypatch.setattr(sleep, "sleep_segments", lambda: {1: weights})
    refused(lambda: CoreMemory(core).release(keep_weights=False, force=False), ReasonCode.HOST_MEMORY_SHORT)
    CoreMemory(core).release(keep_weights=True, force=False)


def test_the_available_memory_of_the_host_is_the_least_of_all_limits(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    inner = cgroups / "pod" / "container"
    for folder in (proc / "self", inner):
        folder.mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9 kB\nMemAvailable:    4096 kB\n")
    assert host_available_bytes(str(proc), str(cgroups)) == 4 * MIB
    (proc / "self" / "cgroup").write_text("0::/pod/container\n")
    for folder, limit in ((inner, "max"), (cgroups / "pod", str(3 * MIB))):
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{2 * MIB}\n")
        (folder / "memory.stat").write_text(f"anon 1\ninactive_file {MIB // 2}\n")
    assert host_available_bytes(str(proc), str(cgroups)) == MIB + MIB // 2
    assert host_available_bytes(str(tmp_path / "nowhere")) is None


def due(bench: CommandBench) -> tuple[CommandResult, ...]:
    bench.scheduler.run_due()
    results = tuple(bench.executor.undelivered)
    bench.executor.undelivered.clear()
    return results


def test_a_command_waits_until_the_engine_has_no_request(core: Core) -> None:
    bench, core.requests = CommandBench(CoreMemory(core)), 1
    assert bench.executor.actions[-2:] == ("release_memory", "resume_memory")
    bench.add("idle", "a", action="release_memory")
    assert due(bench) == ()
    core.requests = 0
    (result,) = due(bench)
    assert (result.outcome, core.asleep) == ("done", {"weights", "kv_cache"})
    core.asleep.clear()
    core.requests = 1
    bench.add("idle", "b", action="release_memory")
    bench.now += 31
    (result,) = due(bench)
    assert (result.outcome, result.reason_code) == ("refused", ReasonCode.ENGINE_BUSY)


def test_a_process_without_an_engine_does_not_offer_it() -> None:
    bench = CommandBench()
    assert "release_memory" not in bench.executor.actions
    for number, mode in enumerate(("now", "idle")):
        bench.add(mode, str(number), action="release_memory")
    assert [each.reason_code for each in due(bench)] == [ReasonCode.NO_ENGINE] * 2
