"""What the reporter sees of vLLM's worker: a class with vLLM's names, whose functions run in another thread."""

from __future__ import annotations

import functools
import gc
import itertools
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from gpumem_client.reporter.engine_start import EngineStart
from tests.support.running_command import run_python
from tests.support.waiting import patient, wait_for

MODULE = "vllm.v1.worker.gpu_worker"


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


class Worker:
    """Waits in each function until the test lets it go on."""

    def __init__(self) -> None:
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.model_runner = types.SimpleNamespace(kv_caches=[])

    def init_device(self) -> None:
        self._stop()

    @traced
    def load_model(self, *, load_dummy_weights: bool = False) -> None:
        self._stop()

    @traced
    def determine_available_memory(self) -> int:
        self._stop()
        self.available_kv_cache_memory_bytes = 1
        return 1

    def execute_model(self) -> None:
        self._stop()

    def _stop(self) -> None:
        self.entered.set()
        assert self.go_on.wait(patient(30))


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Worker]]:
    module = types.ModuleType(MODULE)
    module.Worker = Worker  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    yield Worker
    gc.collect()


class Running:
    """A worker in one of its functions, in a thread of its own."""

    def __init__(self, worker: Worker, function: str) -> None:
        self._worker = worker
        self._thread = threading.Thread(target=getattr(worker, function))

    def __enter__(self) -> None:
        self._worker.entered.clear()
        self._worker.go_on.clear()
        self._thread.start()
        wait_for(self._worker.entered.is_set, "the function")

    def __exit__(self, *_: object) -> None:
        self._worker.go_on.set()
        self._thread.join()


def test_a_program_without_vllm_has_no_engine() -> None:
    assert EngineStart(clock()).is_starting() is None


@pytest.mark.parametrize("function", ["init_device", "load_model", "determine_available_memory"])
def test_a_worker_starts_until_it_knows_the_size_of_its_cache(vllm: type[Worker], function: str) -> None:
    worker, start = vllm(), EngineStart(clock())
    assert start.is_starting() is None
    with Running(worker, function):
        assert start.is_starting() is True
    if function != "determine_available_memory":
        assert start.is_starting() is True, "between two functions it still starts"
        with Running(worker, "determine_available_memory"):
            assert start.is_starting() is True
    assert start.is_starting() is False


def test_a_worker_with_a_given_cache_size_has_started_with_its_cache(vllm: type[Worker]) -> None:
    worker, start = vllm(), EngineStart(clock())
    with Running(worker, "load_model"):
        assert start.is_starting() is True
    worker.model_runner.kv_caches.append(object())
    assert start.is_starting() is False


def test_the_reporter_keeps_no_worker_alive_and_sees_the_next_one(vllm: type[Worker]) -> None:
    worker, start = vllm(), EngineStart(clock())
    with Running(worker, "determine_available_memory"):
        assert start.is_starting() is True
    assert start.is_starting() is False
    del worker
    gc.collect()
    assert start.is_starting() is None
    following = vllm()
    with Running(following, "load_model"):
        assert start.is_starting() is True


def test_a_worker_that_serves_is_no_start(vllm: type[Worker]) -> None:
    worker = vllm()
    with Running(worker, "execute_model"):
        assert EngineStart(clock()).is_starting() is None


@pytest.mark.parametrize("worker_class", [None, "text", object, type("Worker", (), {"load_model": 1})])
def test_another_version_of_vllm_is_unknown(monkeypatch: pytest.MonkeyPatch, worker_class: Any) -> None:
    module = types.ModuleType(MODULE)
    module.Worker = worker_class  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    assert EngineStart(clock()).is_starting() is None


def test_it_imports_nothing_of_vllm() -> None:
    code = (
        "import sys; from gpumem_client.reporter.engine_start import EngineStart; EngineStart().is_starting(); "
        "assert not any(name.startswith('vllm') for name in sys.modules)"
    )
    assert run_python(code).returncode == 0


def test_a_search_is_followed_by_a_pause(vllm: type[Worker]) -> None:
    worker, start = vllm(), EngineStart(clock=lambda: 1.0)
    assert start.is_starting() is None
    with Running(worker, "load_model"):
        assert start.is_starting() is None
