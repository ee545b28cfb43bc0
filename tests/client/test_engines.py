"""What the client reads of inference engines: fake modules with the names and shapes of vLLM 0.32.0 and SGLang 0.5.23.

tests/engines runs a real vLLM.
"""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_client import torch_access
from gpumem_client.engines import engine_state
from gpumem_client.engines.engine_reader import EngineReader
from gpumem_client.engines.engine_state import CacheUse, EngineFacts
from gpumem_client.guest_safety import ErrorLog
from tests.support.waiting import patient, wait_for

GIB = 1 << 30
WORKER, CORE = "vllm.v1.worker.gpu_worker", "vllm.v1.engine.core"
CUMEM, SGLANG = "vllm.device_allocator.cumem", "sglang.srt.managers.scheduler"


def traced(function: Callable[..., Any]) -> Callable[..., Any]:
    """As vLLM and torch decorate the functions of the worker."""

    @functools.wraps(function)
    def wrapper(*arguments: Any, **named: Any) -> Any:
        return function(*arguments, **named)

    return wrapper


def clock() -> Callable[[], float]:
    """Return a clock on which every pause between two searches is over."""
    hours = itertools.count()
    return lambda: next(hours) * 3600.0


class Stopping:
    """Waits in each function until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()

    def stop(self) -> None:
        self.entered.set()
        assert self.go_on.wait(patient(30))


class Running:
    """An object in one of its functions, in a thread of its own."""

    def __init__(self, one: Any, function: str) -> None:
        self._one = one
        self._thread = threading.Thread(target=getattr(one, function))

    def __enter__(self) -> None:
        self._one.entered.clear()
        self._one.go_on.clear()
        self._thread.start()
        wait_for(self._one.entered.is_set, "the function")

    def __exit__(self, *_: object) -> None:
        self._one.go_on.set()
        self._thread.join()


class Worker(Stopping):
    """`vllm.v1.worker.gpu_worker.Worker` of 0.32.0."""

    def __init__(self) -> None:
        super().__init__()
        self.device = SimpleNamespace(index=0)
        self.model_runner = SimpleNamespace(kv_caches=[], requests={})
        self.vllm_config = config()

    def init_device(self) -> None:
        self.stop()

    @traced
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self.stop()

    @traced
    def determine_available_memory(self) -> int:
        self.stop()
        self.available_kv_cache_memory_bytes = 1
        return 1

    def execute_model(self) -> None:
        self.stop()


class EngineCore(Stopping):
    """`vllm.v1.engine.core.EngineCore` of 0.32.0, with its worker in the same process."""

    scheduler: Any

    def __init__(self, worker: Any = None) -> None:
        super().__init__()
        self.vllm_config = config()
        self.model_executor = SimpleNamespace(driver_worker=SimpleNamespace(worker=worker))

    def step(self) -> None:
        self.stop()


class EngineCoreProc(EngineCore):
    """Its process has this loop on the stack for as long as it serves."""

    def run_busy_loop(self) -> None:
        self.stop()


class Scheduler(Stopping):
    """`sglang.srt.managers.scheduler.Scheduler` of 0.5.23, as far as its `__init__` has come before the queues."""

    waiting_queue: list[object]
    running_batch: Any

    def __init__(self) -> None:
        super().__init__()
        self.server_args = SimpleNamespace(served_model_name="chat", model_path="/models/chat")
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=None, gpu_id=0))
        self.is_hybrid_swa = self.is_hybrid_ssm = self.enable_hisparse = False
        self.max_total_num_tokens = 1000
        self.kv_shard_widening = 1
        self.chunked_req = None
        self.grammar_manager = SimpleNamespace(grammar_queue=[])
        self.tree_cache = SimpleNamespace(evictable_size=lambda: 300)
        self.token_to_kv_pool_allocator = SimpleNamespace(
            available_size=lambda: 600, get_kvcache=lambda: SimpleNamespace(mem_usage=4 / 3)
        )

    @traced
    def run_event_loop(self) -> None:
        self.stop()


class Block:
    """`KVCacheBlock`."""

    def __init__(self, ref_cnt: int = 0, block_hash: bytes | None = None) -> None:
        self.ref_cnt, self.block_hash = ref_cnt, block_hash


def config(names: Any = ("chat", "alias")) -> Any:
    model = SimpleNamespace(served_model_name=list(names) if isinstance(names, tuple) else names, model="org/model")
    return SimpleNamespace(model_config=model)


def vllm_scheduler(blocks: list[Block], requests: int = 0) -> Any:
    """Return a scheduler whose pool has these blocks; the first is the placeholder."""
    pool = SimpleNamespace(
        blocks=blocks,
        num_gpu_blocks=len(blocks),
        enable_caching=True,
        free_block_queue=SimpleNamespace(num_free_blocks=sum(block.ref_cnt == 0 for block in blocks[1:])),
        cached_block_hash_to_block={block.block_hash for block in blocks if block.block_hash},
    )
    return SimpleNamespace(kv_cache_manager=SimpleNamespace(block_pool=pool), requests=dict.fromkeys(range(requests)))


class KvTensor:
    """A tensor of `kv_caches`: two layers may be views of one storage."""

    is_cuda = True

    def __init__(self, address: int, nbytes: int, device: int = 0) -> None:
        self._storage = SimpleNamespace(data_ptr=lambda: address, nbytes=lambda: nbytes)
        self._device = device

    def untyped_storage(self) -> Any:
        return self._storage

    def get_device(self) -> int:
        return self._device


class Module:
    """A module with parameters and submodules."""

    def __init__(self, *children: Any, **parameters: Any) -> None:
        self._parameters, self._buffers = parameters, {"none": None}
        self._modules = {str(number): child for number, child in enumerate(children)}


@pytest.fixture(autouse=True)
def small_heap() -> Iterator[None]:
    """Search only what the test creates: the interpreter of a long run has millions of objects."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def no_tensors_of_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch without a GPU, whose tensors are the fake ones."""

    class WithoutTorchFunction:
        def __enter__(self) -> None: ...
        def __exit__(self, *_: object) -> None: ...

    c = SimpleNamespace(TensorBase=KvTensor, DisableTorchFunction=WithoutTorchFunction)
    monkeypatch.setattr(torch_access, "initialized_torch", lambda: SimpleNamespace(_C=c))
    monkeypatch.setattr(engine_state, "_errors", ErrorLog())


def load(monkeypatch: pytest.MonkeyPatch, name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, name, module)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    load(monkeypatch, "vllm", __version__="0.32.0")
    load(monkeypatch, WORKER, Worker=Worker)
    load(monkeypatch, CORE, EngineCore=EngineCore, EngineCoreProc=EngineCoreProc)
    yield
    gc.collect()


def measures(reader: EngineReader) -> bool | None:
    """Return whether a worker measures memory, as one report after the other asks it."""
    reader.look()
    facts = reader.read()
    return None if facts is None else facts.measures


def known(reader: EngineReader) -> EngineFacts:
    reader.look()
    facts = reader.read()
    assert facts is not None
    return facts


@pytest.mark.parametrize("function", ["init_device", "load_model", "determine_available_memory"])
@pytest.mark.usefixtures("vllm")
def test_a_worker_measures_until_it_knows_the_size_of_its_cache(function: str) -> None:
    worker, reader = Worker(), EngineReader(clock())
    assert measures(reader) is None
    with Running(worker, function):
        assert measures(reader) is True
    if function != "determine_available_memory":
        assert measures(reader) is True, "between two functions it still starts"
        with Running(worker, "determine_available_memory"):
            assert measures(reader) is True
    assert measures(reader) is False


@pytest.mark.usefixtures("vllm")
def test_the_reader_keeps_no_worker_alive_and_sees_the_next_one() -> None:
    worker, reader = Worker(), EngineReader(clock())
    with Running(worker, "determine_available_memory"):
        assert measures(reader) is True
    assert measures(reader) is False
    del worker
    gc.collect()
    assert measures(reader) is None
    following = Worker()
    with Running(following, "load_model"):
        assert measures(reader) is True


@pytest.mark.parametrize("worker_class", [None, "text", object, type("Worker", (), {"load_model": 1})])
def test_another_version_of_vllm_is_unknown(monkeypatch: pytest.MonkeyPatch, worker_class: Any) -> None:
    load(monkeypatch, "vllm")
    load(monkeypatch, WORKER, Worker=worker_class)
    assert measures(EngineReader(clock())) is None


@pytest.mark.usefixtures("vllm")
def test_a_search_is_followed_by_a_pause() -> None:
    worker, reader = Worker(), EngineReader(clock=lambda: 1.0)
    assert measures(reader) is None
    with Running(worker, "load_model"):
        assert measures(reader) is None


@pytest.mark.parametrize("function", ["step", "run_busy_loop"])
@pytest.mark.usefixtures("vllm")
def test_a_core_that_serves_shows_its_worker_cache_and_requests(function: str) -> None:
    worker = Worker()
    worker.available_kv_cache_memory_bytes = 6 * GIB
    worker.model_runner.model_memory_usage = 2 * GIB
    shared = KvTensor(1 << 40, 4 * GIB)
    worker.model_runner.kv_caches = [shared, shared, [KvTensor(2 << 40, GIB)], None, KvTensor(1 << 40, GIB, device=1)]
    core, reader = EngineCoreProc(worker), EngineReader(clock())
    used, cached, free = Block(2, b"1"), Block(0, b"2"), Block()
    core.scheduler = vllm_scheduler([Block(), used, cached, cached, free], requests=3)
    with Running(core, function):
        assert known(reader) == EngineFacts(
            "vllm",
            version="0.32.0",
            model="chat",
            measures=False,
            ready=True,
            requests=3,
            held={0: {"weights": 2 * GIB, "kv_cache": 5 * GIB}, 1: {"kv_cache": GIB}},
            cache=CacheUse(used=0.25, evictable=0.5),
        )


@pytest.mark.parametrize(
    ("runner", "requests"),
    [
        ({"requests": {"a": 1}}, 1),
        ({"req_states": SimpleNamespace(req_id_to_index={"a": 0, "b": 1})}, 2),  # the second version of the runner
        ({}, None),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_a_worker_of_several_knows_its_requests_and_not_the_use_of_the_cache(runner: Any, requests: int | None) -> None:
    worker, reader = Worker(), EngineReader(clock())
    worker.model_runner = SimpleNamespace(kv_caches=[KvTensor(1, GIB)], **runner)
    with Running(worker, "load_model"):
        facts = known(reader)
    assert (facts.requests, facts.cache, facts.ready, facts.held) == (requests, None, True, {0: {"kv_cache": GIB}})


@pytest.mark.usefixtures("vllm")
def test_the_evictable_blocks_are_counted_again_when_the_cache_has_changed() -> None:
    core, reader = EngineCore(Worker()), EngineReader(clock())
    cached = Block(0, b"1")
    core.scheduler = vllm_scheduler([Block(), cached, Block(), Block(), Block()])
    pool = core.scheduler.kv_cache_manager.block_pool
    with Running(core, "step"):
        assert known(reader).cache == CacheUse(0.0, 0.25)
    cached.ref_cnt, pool.free_block_queue.num_free_blocks = 1, 3
    assert known(reader).cache == CacheUse(0.25, 0.0)
    pool.enable_caching = False
    assert known(reader).cache == CacheUse(0.25, 0.0)


class Odd:
    """Whatever another version may have: properties that raise, and a dictionary that changes while it is read."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)


class Changing(dict[int, Any]):
    def keys(self) -> Any:
        raise RuntimeError("dictionary changed size during iteration")


@pytest.mark.parametrize("odd", [None, 1, "text", object(), [], {}, pytest.param(Odd(), id="odd")])
@pytest.mark.usefixtures("vllm")
def test_objects_of_another_version_are_absent_and_never_raise(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, odd: Any
) -> None:
    caplog.set_level("DEBUG", "gpumem_client")
    load(monkeypatch, CUMEM, CuMemAllocator=SimpleNamespace(instance=odd))
    core, worker, reader = EngineCore(), Worker(), EngineReader(clock())
    with Running(core, "step"), Running(worker, "load_model"):
        reader.look()
    core.vllm_config = odd
    for name in ("model_runner", "device", "vllm_config"):
        setattr(worker, name, odd)
        for _ in range(2):
            facts = known(reader) if not isinstance(odd, Odd) else reader.read()
            assert facts is None or (facts.model, facts.held, facts.cache) in [("", {}, None), ("chat", {}, None)]
    core.scheduler = odd
    reader.look()
    for _ in range(2):
        facts = reader.read()
        assert facts is None or facts.cache is None
    assert reader.segment_components() == {}
    assert len([each for each in caplog.records if each.levelname != "DEBUG"]) == 0
    assert len(caplog.records) <= 5, "one line for each kind"


@pytest.mark.usefixtures("vllm")
def test_sleep_mode_shows_the_component_of_each_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    tags = ["weights", "kv_cache", "runtime", "workspace", "cudagraph", "default", "of a later version"]
    allocations = {address: SimpleNamespace(tag=tag) for address, tag in enumerate(tags)}
    load(monkeypatch, CUMEM, CuMemAllocator=SimpleNamespace(instance=SimpleNamespace(pointer_to_data=allocations)))
    reader = EngineReader(clock())
    assert reader.segment_components() == {}, "only a look loads code"
    reader.look()
    names = ["weights", "kv_cache", "runtime", "runtime", "cuda_graphs", "other", "other"]
    assert reader.segment_components() == dict(enumerate(names))
    changing = SimpleNamespace(pointer_to_data=Changing(allocations))
    load(monkeypatch, CUMEM, CuMemAllocator=SimpleNamespace(instance=changing))
    assert isinstance(reader.segment_components(), dict)


def test_sglang_shows_its_weights_cache_tokens_and_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    load(monkeypatch, "sglang", __version__="0.5.23")
    load(monkeypatch, SGLANG, Scheduler=Scheduler)
    scheduler, reader = Scheduler(), EngineReader(clock())
    with Running(scheduler, "run_event_loop"):
        facts = known(reader)
    assert (facts.name, facts.version, facts.model, facts.ready) == ("sglang", "0.5.23", "chat", False)
    scheduler.waiting_queue, scheduler.running_batch = [1], SimpleNamespace(reqs=[2, 3])
    tied = KvTensor(1, GIB)
    scheduler.tp_worker.model_runner.model = Module(Module(a=tied), None, Module(b=KvTensor(2, 5)), c=tied)
    facts = known(reader)
    assert (facts.ready, facts.requests, facts.cache) == (True, 3, CacheUse(0.1, 0.3))
    assert facts.held == {0: {"weights": GIB + 5, "kv_cache": GIB * 4 // 3}}
    scheduler.is_hybrid_swa = True
    assert known(reader).cache is None, "tokens of several sizes"


@pytest.mark.parametrize(
    ("changes", "available", "found"),
    [
        ({}, 700, {"requests": 0}),
        ({"chunked_req": object()}, 700, {"requests": 1}),
        ({"grammar_manager": SimpleNamespace(grammar_queue=[1, 2])}, 700, {"requests": 2}),
        ({}, 699, {"requests": 1}),  # a prompt whose batch runs
        # An interleaved cache has the tokens of all its ranks.
        ({"kv_shard_widening": 2}, 1700, {"cache": CacheUse(0.0, 0.15)}),
        ({"kv_shard_widening": 2}, 600, {"cache": CacheUse(0.55, 0.15)}),
        ({"kv_shard_widening": 2}, 2001, {"cache": None}),
    ],
)
def test_sglang_is_busy_with_requests_that_are_in_no_queue_and_has_the_tokens_of_all_ranks(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], available: int, found: dict[str, Any]
) -> None:
    load(monkeypatch, "sglang", __version__="0.5.23")
    load(monkeypatch, SGLANG, Scheduler=Scheduler)
    scheduler, reader = Scheduler(), EngineReader(clock())
    with Running(scheduler, "run_event_loop"):
        known(reader)
    scheduler.waiting_queue, scheduler.running_batch = [], SimpleNamespace(reqs=[])
    scheduler.token_to_kv_pool_allocator.available_size = lambda: available
    for name, value in changes.items():
        setattr(scheduler, name, value)
    facts = known(reader)
    assert {name: getattr(facts, name) for name in found} == found
