"""Waiting for conditions, with one factor for slow machines.

`GPUMEM_PATIENCE` multiplies every wait and timeout of the tests: 3 on a machine that is three times slower. Limits
are generous; a test that passes never waits longer than its condition takes.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PATIENCE = float(os.environ.get("GPUMEM_PATIENCE") or "1")
"""The factor; 1 unless the environment sets it."""


def patient(seconds: float) -> float:
    """Return a timeout multiplied by the patience factor."""
    return seconds * PATIENCE


def wait_for(condition: Callable[[], T | None], what: str, timeout_seconds: float = 60.0) -> T:
    """Call `condition` until it returns something true, and return that.

    The AssertionError after the timeout (times the patience factor) has `what` and the last value.
    """
    found = eventually(condition, bool, timeout_seconds, what)
    assert found is not None
    return found


def wait_until_equal(read: Callable[[], object], wanted: object, what: str, timeout_seconds: float = 60.0) -> None:
    """Call `read` until it returns `wanted`; fails as `wait_for` does."""
    eventually(read, lambda value: value == wanted, timeout_seconds, f"{what}:\n{wanted!r}\n")


def eventually(
    read: Callable[[], T], wanted: Callable[[T], bool] = bool, timeout_seconds: float = 60.0, what: str = ""
) -> T:
    """Call `read` until `wanted` accepts its value, and return that value; fails as `wait_for` does."""
    limit = patient(timeout_seconds)
    end = time.monotonic() + limit
    pause_seconds = 0.002
    while not wanted(value := read()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {limit:g} s for {what or 'a condition'}; the last value was\n{value!r}")
        time.sleep(pause_seconds)
        pause_seconds = min(1.5 * pause_seconds, 0.1)  # a read may cost the program that is waited for
    return value
