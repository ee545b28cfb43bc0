from __future__ import annotations

import pytest

from gpumem_exporter.actions.rate_limits import RateLimits
from gpumem_exporter.edge.problems import retry_after
from gpumem_exporter.errors import TooManyActionsError


class Bench:
    def __init__(self) -> None:
        self.now = 0.0
        self.limits = RateLimits(per_caller=6, per_process=3, clock=lambda: self.now)

    def take(self, caller: str = "me", *processes: int) -> None:
        self.limits.take(caller, [(pid, f"pid {pid}") for pid in processes])


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_a_full_minute_of_actions_may_come_at_once_and_refills_over_the_minute(bench: Bench) -> None:
    for _ in range(6):
        bench.take()
    with pytest.raises(TooManyActionsError, match=r"^me\b.*\b6\b") as caught:
        bench.take()
    assert caught.value.retry_seconds == pytest.approx(10.0)
    assert retry_after(caught.value.retry_seconds) == "10"
    bench.now += caught.value.retry_seconds
    bench.take()
    with pytest.raises(TooManyActionsError):
        bench.take()
    bench.take("another caller")
    bench.now += 3600.0  # unused actions do not accumulate
    for _ in range(6):
        bench.take()
    with pytest.raises(TooManyActionsError):
        bench.take()


def test_the_limit_of_a_process_counts_all_callers_and_a_refused_action_counts_for_none(bench: Bench) -> None:
    for caller in ("a", "b", "c"):
        bench.take(caller, 1)
    for _ in range(10):
        with pytest.raises(TooManyActionsError, match=r"^pid 1\b.*\b3\b"):
            bench.take("d", 2, 1)
    for _ in range(3):
        bench.take("d", 2)  # neither the caller's nor the other process' share has been touched


def test_a_kind_of_action_may_have_a_lower_limit_for_a_process(bench: Bench) -> None:
    for _ in range(2):
        bench.limits.take("a", [(1, "pid 1")], per_process=2)
    with pytest.raises(TooManyActionsError, match=r"^pid 1\b.*\b2 actions of this kind\b") as caught:
        bench.limits.take("b", [(1, "pid 1")], per_process=2)
    assert caught.value.retry_seconds == pytest.approx(30)
    bench.limits.take("b", [(2, "pid 2")], per_process=2)
    bench.now += 30
    bench.limits.take("b", [(1, "pid 1")], per_process=2)


def test_the_number_of_remembered_callers_and_processes_is_limited(bench: Bench) -> None:
    def spend() -> None:
        for number in range(6):
            bench.take("first", 1 if number < 3 else 2)

    spend()
    for number in range(4096):
        bench.take(f"caller {number}", 1000 + number)
    spend()  # the first caller and its processes are the oldest and were forgotten; the others are remembered
    for _ in range(5):
        bench.take("caller 4095")
    with pytest.raises(TooManyActionsError):
        bench.take("caller 4095")
