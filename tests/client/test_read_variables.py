"""The reading of other threads' variables, beside their tracers and profilers."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest

from gpumem_client.objects.holders import variables_in
from gpumem_client.uninterrupted import Uninterrupted


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
