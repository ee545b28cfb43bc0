from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gpumem_client import torch_access
from gpumem_client.allocator.sampler import Sampler
from gpumem_client.commands.executor import Executor
from gpumem_client.hooks import graph_captures
from gpumem_client.hooks.graph_captures import GraphCaptures
from gpumem_client.wire.protocol import Command, CommandResult
from tests.support.builders.fake_allocator import FakeAllocator
from tests.support.waiting import patient


class Bench:
    """A class like torch's CUDAGraph, a watch of its captures, and a second thread in which they run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, end: str = "capture_end_pre") -> None:
        class CUDAGraph:
            """Has a pool from its capture until its reset."""

            id: tuple[int, int] | None = None

            def capture_begin(self, pool: tuple[int, int], *, fails: bool = False) -> None:
                if fails:
                    raise RuntimeError("cannot start a capture")
                self.id = pool

            def ends(self, *, fails: bool = False) -> None:
                if fails:
                    self.id = None
                    raise RuntimeError("the capture was invalidated")

            def pool(self) -> tuple[int, int]:
                if self.id is None:
                    raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
                return self.id

        setattr(CUDAGraph, end, CUDAGraph.ends)
        self.graph_class, self.end_name = CUDAGraph, end
        self.captures = GraphCaptures()
        monkeypatch.setattr(graph_captures, "_captures", self.captures)  # allocators of other tests watch
        monkeypatch.setitem(sys.modules, "torch.cuda.graphs", SimpleNamespace(CUDAGraph=CUDAGraph))
        self.remove = self.captures.watch()
        self.other = ThreadPoolExecutor(1)

    def elsewhere(self, work: Callable[..., Any], *args: Any, **named: Any) -> Any:
        return self.other.submit(work, *args, **named).result()

    def begin(self, graph: Any, pool: tuple[int, int] = (1, 0), **named: Any) -> None:
        """Start a capture in the second thread, as `end` ends it there."""
        self.elsewhere(graph.capture_begin, pool, **named)

    def end(self, graph: Any, **named: Any) -> None:
        self.elsewhere(getattr(graph, self.end_name), **named)

    def fail(self, graph: Any) -> None:
        with pytest.raises(RuntimeError, match="invalidated"):
            self.end(graph, fails=True)

    def under_way(self) -> bool:
        return bool(self.captures.running())

    def capture(self, pool: tuple[int, int]) -> Any:
        graph = self.graph_class()
        self.begin(graph, pool)
        self.end(graph)
        return graph


@pytest.fixture(params=["capture_end_pre", "capture_end"], ids=["torch 2.14 and later", "before"])
def bench(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(monkeypatch, request.param)
    with bench.other:
        yield bench
    bench.remove()


def test_a_capture_whose_end_or_start_fails_is_over_in_every_thread(bench: Bench) -> None:
    graph = bench.graph_class()
    bench.begin(graph)
    bench.fail(graph)
    assert not bench.under_way()
    with pytest.raises(RuntimeError, match="cannot start"):
        bench.begin(graph, fails=True)
    assert not bench.under_way()
    bench.begin(graph)
    assert bench.under_way(), "a second capture into the same graph"
    bench.end(graph)
    assert not bench.under_way()


def test_a_capture_is_over_when_its_graph_is_deleted(bench: Bench) -> None:
    graph = bench.graph_class()
    bench.begin(graph)
    del graph
    assert not bench.under_way()


def test_a_pool_whose_first_graph_is_deleted_during_a_second_capture_is_alive(bench: Bench) -> None:
    first, second = bench.capture((1, 0)), bench.graph_class()
    bench.begin(second, (1, 0))
    del first
    assert not bench.captures.dead_pools()
    bench.end(second)
    assert not bench.captures.dead_pools()
    del second
    assert set(bench.captures.dead_pools()) == {(1, 0)}


def test_a_pool_is_alive_again_after_a_capture_into_the_id_of_a_dead_one(bench: Bench) -> None:
    graph = bench.capture((1, 0))
    del graph
    assert set(bench.captures.dead_pools()) == {(1, 0)}
    again = bench.capture((1, 0))
    assert not bench.captures.dead_pools()
    del again
    assert set(bench.captures.dead_pools()) == {(1, 0)}


def test_a_graph_that_was_reset_or_captured_again_no_longer_uses_its_old_pool(bench: Bench) -> None:
    reset, again = bench.capture((1, 0)), bench.capture((2, 0))
    reset.id = None
    again.id = (3, 0)
    assert set(bench.captures.dead_pools()) == {(1, 0), (2, 0)}


def test_a_pool_of_the_user_never_counts_as_dead(bench: Bench) -> None:
    graph = bench.capture((0, 4))
    del graph
    assert not bench.captures.dead_pools()


def test_no_pool_counts_as_dead_while_a_graph_with_an_incomplete_capture_exists(bench: Bench) -> None:
    dead = bench.capture((1, 0))
    del dead
    failed = bench.graph_class()
    bench.begin(failed)
    assert not bench.captures.dead_pools()
    bench.fail(failed)
    assert not bench.captures.dead_pools()
    del failed
    assert set(bench.captures.dead_pools()) == {(1, 0)}


def test_a_capture_is_assumed_while_the_driver_rejects_the_query() -> None:
    def rejected() -> bool:
        raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")

    c = SimpleNamespace(_cuda_isCurrentStreamCapturing=rejected)
    assert torch_access.current_stream_is_capturing(SimpleNamespace(_C=c))


class SlowClear(FakeAllocator):
    """An allocator whose clear is under way until `release` is set, and the command that clears."""

    def __init__(self, captures: GraphCaptures) -> None:
        self.captures = captures
        super().__init__()
        self.started, self.release = threading.Event(), threading.Event()
        self.thread = ThreadPoolExecutor(1)

    @property
    def capturing(self) -> bool:
        return bool(self.captures.running())

    @capturing.setter
    def capturing(self, value: bool) -> None:
        pass

    def empty_cache(self) -> None:
        self.started.set()
        assert self.release.wait(patient(60))
        super().empty_cache()

    def command(self) -> Future[CommandResult | None]:
        executor = Executor(cast("Any", self), Sampler(cast("Any", self), swallow=lambda error: None))
        return self.thread.submit(executor.run, Command("a", "empty_cache", 60.0), expires_seconds=float("inf"))


@pytest.fixture
def clear(bench: Bench) -> Iterator[SlowClear]:
    clear = SlowClear(bench.captures)
    with clear.thread:
        yield clear
        clear.release.set()


def test_a_clear_that_hangs_keeps_no_capture_from_starting(
    bench: Bench, clear: SlowClear, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graph_captures, "_CLEAR_SECONDS", 0.01)
    result = clear.command()
    assert clear.started.wait(patient(60))
    graph = bench.graph_class()
    bench.begin(graph)
    clear.release.set()
    result.result(patient(60))
    again = clear.command().result(patient(60))
    assert again is not None
    assert again.reason_code == "cuda_graph_capture"
    bench.end(graph)


def test_a_clear_may_capture_in_its_own_thread(bench: Bench) -> None:
    def finalizer() -> None:
        graph = bench.graph_class()
        graph.capture_begin((1, 0))
        getattr(graph, bench.end_name)()

    with bench.captures.no_start() as quiet:
        assert quiet
        finalizer()
