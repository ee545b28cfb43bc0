from __future__ import annotations

from typing import Any

import pytest

from gpumem_client.hooks.out_of_memory import OutOfMemoryLog, OutOfMemoryObserver
from gpumem_client.wire.protocol import OutOfMemory


class Bench:
    def __init__(self) -> None:
        self.now = 100.0
        self.wakes = 0
        self.log = OutOfMemoryLog(self._wake, clock=lambda: self.now)

    def _wake(self) -> None:
        self.wakes += 1

    def note(self, **changes: Any) -> None:
        self.log.note(OutOfMemory("GPU-0", 0, **changes))


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_error_is_sent_until_a_report_with_it_was_answered(bench: Bench) -> None:
    bench.note()
    sent = bench.log.waiting()
    bench.note()
    bench.log.reported(())
    assert len(bench.log.waiting()) == 2
    bench.log.reported(sent)
    assert [oom.number for oom in bench.log.waiting()] == [2]


def test_many_errors_wake_the_reporter_once_and_the_last_are_kept(bench: Bench) -> None:
    for _ in range(100):
        bench.note()
    assert bench.wakes == 1
    assert [oom.number for oom in bench.log.waiting()] == list(range(69, 101))
    bench.now += 0.5
    bench.note()
    assert bench.wakes == 2


def test_an_observer_raises_nothing() -> None:
    observer = OutOfMemoryObserver()
    observer(0, 1, 2, 3)

    def fail(*_: int) -> None:
        raise RuntimeError

    observer.listener = fail
    observer(0, 1, 2, 3)
