"""Programs of C functions, between which no other thread runs, and which keep nothing."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from itertools import compress
from typing import Any

import pytest

from gpumem_client.objects.holders import variables_in
from gpumem_client.uninterrupted import Slices, Uninterrupted


def _traced(_frame: Any, _event: str, _argument: Any) -> Any:
    return _traced


def _added(one: int, other: int) -> int:
    both = (one, other)
    return sum(both)


@pytest.mark.parametrize("hook", ["settrace", "setprofile"])
def test_a_traced_thread_keeps_its_variables(hook: str) -> None:
    errors: list[UnboundLocalError] = []
    ended = threading.Event()

    def work() -> None:
        getattr(sys, hook)(_traced)
        try:
            while not ended.is_set():
                total = 0
                for number in range(50):
                    total += _added(number, 1)
        except UnboundLocalError as error:
            errors.append(error)
        finally:
            getattr(sys, hook)(None)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(200):
        read = Uninterrupted()
        functions, _, variables = variables_in(read, ())
        names = read.kept(map(len, variables))
        read.run()
        assert functions
        assert names
        if errors:
            break
    ended.set()
    thread.join()
    assert not errors


class Thing:
    """A target of references."""


def test_a_program_reads_objects_and_keeps_none() -> None:
    things = [Thing() for _ in range(10)]
    seen = weakref.ref(things[0])
    read = Uninterrupted()
    lists = read.tracked()
    found = read.held(compress(lists[0] if lists else (), ()))
    kept = read.kept(map(id, things))
    again = read.unseen(things, set())
    assert read.run() > 0
    assert kept == list(map(id, things))
    assert (lists, found, again) == ([], [], [])
    things.clear()
    assert seen() is None


def test_collections_are_as_before_also_after_an_error() -> None:
    for enabled in (True, False):
        (gc.enable if enabled else gc.disable)()
        try:
            read = Uninterrupted()
            held = read.held([Thing()])
            read.call(int, "x")
            with pytest.raises(ValueError, match="x"):
                read.run()
            assert held == []
            assert gc.isenabled() is enabled
            assert Uninterrupted().run() >= 0
            assert gc.isenabled() is enabled
        finally:
            gc.enable()


def test_no_other_thread_runs_within_a_program() -> None:
    counted: list[int] = [0]
    ended = threading.Event()

    def count() -> None:
        while not ended.is_set():
            counted[0] += 1

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = threading.Thread(target=count)
    thread.start()
    try:
        read = Uninterrupted()
        first = read.kept(map(counted.__getitem__, (0,)))
        read.kept(map(id, range(300_000)))
        last = read.kept(map(counted.__getitem__, (0,)))
        read.run()
    finally:
        ended.set()
        thread.join()
        sys.setswitchinterval(interval)
    assert first == last


def test_the_job_runs_for_as_long_as_a_slice_took() -> None:
    paused: list[float] = []
    rested: list[float] = []

    class Rested(Slices):
        def rest(self, seconds: float) -> None:
            rested.append(seconds)

    read = Uninterrupted()
    numbers: Any = read.kept(map(id, range(1000)))
    Rested(paused=paused.append).run(read)
    assert len(numbers) == 1000
    assert paused == rested
    assert paused[0] > 0
