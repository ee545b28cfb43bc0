"""The allocated bytes of a training process at the end of each step, generated from a seed in several patterns.

The device has 8 GiB. A run without a leak returns to its minimum within about 150 steps; a leak is added to that.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Iterator

MIB = 1 << 20
DEVICE_BYTES = 8 << 30

Shape = Callable[[int, random.Random], int]


def _sawtooth(period: int, rise: int) -> Shape:
    return lambda step, rng: step % period * rise


SHAPES: dict[str, Shape] = {
    "every step the same": lambda step, rng: 0,
    "batches of many lengths": lambda step, rng: rng.randrange(0, 9) * MIB,
    "an evaluation every 25 steps": lambda step, rng: (400 * MIB if step % 25 < 3 else 0) + rng.randrange(0, 3) * MIB,
    "gradients of 512 MiB accumulated over 8 steps": lambda step, rng: (
        (512 * MIB if step % 8 else 0) + rng.randrange(0, 3) * MIB
    ),
    "a sawtooth of 16 steps and 64 MiB": _sawtooth(16, 4 * MIB),
    "a sawtooth of 40 steps and 120 MiB": _sawtooth(40, 3 * MIB),
}
"""In each pattern, a leak of one percent of the device in 1,000 steps is found within 200 steps."""


def _irregular() -> Shape:
    held, left = 0, 0

    def shape(step: int, rng: random.Random) -> int:
        nonlocal held, left
        held, left = (0, rng.randrange(10, 50)) if left <= 0 else (held + 2 * MIB, left - 1)
        return held

    return shape


def _drifting() -> Shape:
    away = 0.0

    def shape(step: int, rng: random.Random) -> int:
        nonlocal away
        away = 0.9 * away + rng.gauss(0, 3)
        return int(away * MIB)

    return shape


def _generations() -> Shape:
    young, old, left, collections = 0.0, 0.0, 0, 0

    def shape(step: int, rng: random.Random) -> int:
        nonlocal young, old, left, collections
        if left <= 0:
            collections += 1
            old = 0.0 if collections % 5 == 0 else old + 0.3 * young
            young, left = 0.0, rng.randrange(10, 30)
        else:
            young, left = young + 2, left - 1
        return int((young + old) * MIB)

    return shape


def _buffer() -> Shape:
    kept: deque[int] = deque([5] * 20, maxlen=20)

    def shape(step: int, rng: random.Random) -> int:
        kept.append(rng.randrange(1, 9))
        return sum(kept) * MIB

    return shape


def hard_shapes() -> dict[str, Shape]:
    """Return patterns that must not cause false alarms, but in which a leak is found later."""
    return {
        "garbage collected at irregular times": _irregular(),
        "garbage of which every fifth collection alone frees all": _generations(),
        "a buffer of the last 20 batches": _buffer(),
        "drifting about": _drifting(),
        "a cache that fills up to 200 MiB": lambda step, rng: (
            int(200 * MIB * (1 - math.exp(-step / 60))) + rng.randrange(0, 3) * MIB
        ),
    }


def allocated(shape: Shape, seed: int, *, percent: float = 0.0, from_step: int = 0, every: int = 1) -> Iterator[int]:
    """Yield the allocated bytes after each step, without end.

    It leaks `percent` of the device in 1,000 steps, from a step on; with `every`, larger leaks are this many steps
    apart.
    """
    rng = random.Random(seed)
    base = rng.randrange(500, 4000) * MIB
    leaked, step = 0, 0
    while True:
        warm_up = int(300 * MIB * (1 - math.exp(-step / 3)))
        if step >= from_step and (step - from_step) % every == 0:
            leaked += int(DEVICE_BYTES * percent / 100 / 1000 * every)
        yield base + warm_up + shape(step, rng) + leaked
        step += 1
