from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from gpumem_exporter.client.allocator.captures import Captures


class Graph:
    """A CUDA graph's wrapper: it knows its pool once it has been captured, and until it is reset."""

    def __init__(self, pool: tuple[int, int]) -> None:
        self.id: tuple[int, int] | None = pool

    def pool(self) -> tuple[int, int]:
        if self.id is None:
            raise RuntimeError("Called CUDAGraph::pool() without a preceding successful capture.")
        return self.id


class Bench:
    """The two hooks of `torch.cuda.graphs`, and a thread beside this one in which the captures happen."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.hooks: dict[str, Callable[[Any], None]] = {}
        self.capturing: set[int] = set()
        """The threads whose current stream is in a capture."""
        graphs = SimpleNamespace(
            register_graph_capture_start_hook=lambda hook: self._register("start", hook),
            register_graph_capture_end_hook=lambda hook: self._register("end", hook),
        )
        monkeypatch.setitem(sys.modules, "torch.cuda.graphs", graphs)
        self.captures = Captures(lambda: threading.get_ident() in self.capturing)
        self.remove = self.captures.watch()
        self.other = ThreadPoolExecutor(1)

    def _register(self, name: str, hook: Callable[[Any], None]) -> Any:
        self.hooks[name] = hook
        return SimpleNamespace(remove=lambda: self.hooks.pop(name))

    def elsewhere(self, work: Callable[[], Any]) -> Any:
        return self.other.submit(work).result()

    def begin(self, graph: Graph) -> None:
        """In the other thread."""

        def begin() -> None:
            self.capturing.add(threading.get_ident())
            self.hooks["start"](graph)

        self.elsewhere(begin)

    def end(self, graph: Graph, *, well: bool = True) -> None:
        def end() -> None:
            self.capturing.remove(threading.get_ident())
            if well:  # otherwise torch runs no hook
                self.hooks["end"](graph)

        self.elsewhere(end)

    def under_way(self) -> bool:
        return self.captures.under_way

    def capture(self, pool: tuple[int, int]) -> Graph:
        graph = Graph(pool)
        self.begin(graph)
        self.end(graph)
        return graph


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    bench = Bench(monkeypatch)
    with bench.other:
        yield bench


def test_a_capture_in_another_thread_is_under_way_until_it_ends(bench: Bench) -> None:
    graph = Graph((1, 0))
    assert not bench.under_way()
    bench.begin(graph)
    assert bench.under_way()
    assert bench.elsewhere(bench.under_way)
    bench.end(graph)
    assert not bench.under_way()


def test_a_capture_whose_end_failed_may_be_under_way_until_its_own_thread_is_in_no_capture(bench: Bench) -> None:
    graph = Graph((1, 0))
    bench.begin(graph)
    bench.end(graph, well=False)
    assert bench.under_way(), "no other thread can tell"
    assert not bench.elsewhere(bench.under_way)
    assert not bench.under_way()


def test_a_capture_whose_end_failed_is_over_when_its_graph_is_gone(bench: Bench) -> None:
    graph = Graph((1, 0))
    bench.begin(graph)
    bench.end(graph, well=False)
    del graph
    assert not bench.under_way()


def test_a_second_capture_into_the_graph_of_a_failed_one_is_under_way(bench: Bench) -> None:
    graph = Graph((1, 0))
    bench.begin(graph)
    bench.end(graph, well=False)
    assert not bench.elsewhere(bench.under_way)
    bench.begin(graph)
    assert bench.under_way()


def test_a_graphs_pool_is_dead_when_the_last_graph_in_it_is(bench: Bench) -> None:
    first, second = bench.capture((1, 0)), bench.capture((1, 0))
    assert not bench.captures.dead_pools()
    del first
    assert not bench.captures.dead_pools()
    del second
    assert set(bench.captures.dead_pools()) == {(1, 0)}


def test_a_graph_that_was_reset_or_captured_anew_holds_its_old_pool_no_more(bench: Bench) -> None:
    reset, anew = bench.capture((1, 0)), bench.capture((2, 0))
    reset.id = None
    anew.id = (3, 0)
    assert set(bench.captures.dead_pools()) == {(1, 0), (2, 0)}


def test_a_pool_that_the_program_made_is_never_called_dead(bench: Bench) -> None:
    graph = bench.capture((0, 4))
    del graph
    assert not bench.captures.dead_pools()


def test_no_pool_is_called_dead_while_a_capture_that_began_may_hold_it(bench: Bench) -> None:
    dead = bench.capture((1, 0))
    del dead
    failed = Graph((1, 0))
    bench.begin(failed)
    version = bench.captures.version()
    assert not bench.captures.dead_pools()
    bench.end(failed, well=False)
    assert not bench.captures.dead_pools()
    del failed
    assert set(bench.captures.dead_pools()) == {(1, 0)}
    assert bench.captures.version() != version


def test_the_version_changes_with_each_death_and_only_then(bench: Bench) -> None:
    graphs = [bench.capture((number, 0)) for number in range(1, 4)]
    versions = {bench.captures.version() for _ in range(3)}
    while graphs:
        graphs.pop()
        versions |= {bench.captures.version() for _ in range(3)}
    assert len(versions) == 4
    bench.captures.keep_only({(1, 0), (9, 0)})
    assert set(bench.captures.dead_pools()) == {(1, 0)}
    assert bench.captures.version() in versions


def test_hooks_can_be_taken_out(bench: Bench) -> None:
    assert set(bench.hooks) == {"start", "end"}
    bench.remove()
    assert bench.hooks == {}


def test_a_torch_without_hooks_tells_of_the_calling_thread_alone(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.cuda.graphs", SimpleNamespace())
    captures = Captures(lambda: threading.get_ident() in bench.capturing)
    captures.watch()()
    bench.elsewhere(lambda: bench.capturing.add(threading.get_ident()))
    assert not captures.under_way
    assert bench.elsewhere(lambda: captures.under_way)


def test_where_the_driver_forbids_the_question_a_capture_is_assumed() -> None:
    def forbidden() -> bool:
        raise RuntimeError("operation would make the legacy stream depend on a capturing blocking stream")

    assert Captures(forbidden).under_way
