"""How long a process has been inactive."""

from __future__ import annotations

from typing import Any

from gpumem_client.reporter.activity import Activity
from tests.support.builders.builders import Clock


def test_steps_allocations_and_requests_are_activity() -> None:
    clock = Clock(100.0)
    activity = Activity(clock)

    def after(seconds: float, **seen: Any) -> float | None:
        clock.sleep(seconds)
        return activity.inactive_seconds(**{"step": None, "allocations": (4,), "requests": None, **seen})

    assert after(10) == 0
    assert after(600) == 600
    assert after(1, allocations=(5,)) == 0
    assert after(5, allocations=None) == 5, "another thread empties the cache"
    assert after(5, allocations=(5,)) == 10
    assert after(5, allocations=(5,), requests=1) == 0
    assert after(5, allocations=(5,), requests=0) == 5
    assert after(5, allocations=(5,), step=1) == 0
    assert after(900, allocations=(5,), step=1) == 900


def test_without_a_sign_that_could_be_seen_it_is_unknown() -> None:
    clock = Clock(100.0)
    activity = Activity(clock)
    assert activity.inactive_seconds(step=None, allocations=None, requests=None) is None
    clock.sleep(60)
    assert activity.inactive_seconds(step=3, allocations=None, requests=None) == 0
    clock.sleep(60)
    assert activity.inactive_seconds(step=3, allocations=None, requests=None) == 60


def test_a_process_that_may_replay_graphs_is_not_known_to_be_inactive() -> None:
    clock = Clock(100.0)
    activity = Activity(clock)

    def after(seconds: float, *, graphs: bool, **seen: Any) -> float | None:
        clock.sleep(seconds)
        return activity.inactive_seconds(**{"step": 3, "allocations": (4,), "requests": None, **seen}, graphs=graphs)

    assert after(10, graphs=True) == 0
    assert after(20, graphs=True) == 20, "a long step"
    assert after(600, graphs=True) is None
    assert after(1, graphs=True, allocations=(5,)) == 0
    assert after(600, graphs=True, allocations=(5,)) is None
    assert after(5, graphs=False, allocations=(5,)) == 0, "they may have run until now"
    assert after(600, graphs=False, allocations=(5,)) == 600
    assert after(600, graphs=True, allocations=(5,), requests=0) == 1200, "the engine shows its requests"
