"""Measures the leak detector: its false alarms, the steps until it finds a leak, and its cost.

    python -m benchmarks.leaks [--quick] [--json] [--real-gpu]

The training runs come from seeds (tests/support/builders/seeded_runs.py), on a device of 8 GiB. So alarms and steps do
not depend on the machine. Costs are CPU time of the training thread, with real torch on the emulated node or on a GPU.
The benchmark compares a look with `torch.cuda.memory_stats()`. It compares a value that arrives while memory rises with
one linear regression of a window by Python's `statistics`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from itertools import islice

from benchmarks.claims import Options, Progress, Row, compared, show
from benchmarks.place import Place
from gpumem_toolkit.leaks.trend import Trend
from tests.support.builders.seeded_runs import SHAPES, Shape, allocated, hard_shapes

FOUND_STEPS = 200
LOOK_RATIO = 1.0
RISING_RATIO = 15.0
GUARD_RATIO = 1.0
PERCENTS = (1.0, 2.0, 5.0)
LEAK_STEPS = 2000
WINDOW = 256

COSTS = """
import gpumem_toolkit as toolkit
from gpumem_toolkit.leaks.detector import LeakDetector
import time
torch.empty(1, device="cuda")
clock = time.thread_time
detector = LeakDetector(lambda leak: None)
guard = toolkit.oom_guard(batch_size=8)
def guarded():
    with guard:
        pass
works = {"look": detector.look, "guard": guarded, "memory_stats": torch.cuda.memory_stats}
result = {name: [] for name in works}
for _ in range(rounds):
    for name, work in works.items():
        started = clock()
        work()
        result[name].append(clock() - started)
"""


def main() -> int:
    options = Options(__doc__)
    options.amount("--runs", 20, 1, "seeds of each pattern")
    options.amount("--steps", 3000, 1000, "steps of the runs without a leak")
    given = options.read()
    patterns = {**SHAPES, **hard_shapes()}
    progress = Progress("leaks", len(patterns) + 1)
    alarms, rows = 0, []
    for name, shape in patterns.items():
        progress.part(name)
        false, row = runs(given, progress, name, shape)
        alarms += false
        rows.append(row)
    what = f"false alarms in {given.runs * len(patterns)} runs of {given.steps} steps without a leak"
    rows.insert(0, Row(what, alarms, "", limit=1))
    progress.part("costs")
    rows += costs(given)
    return show("leaks", rows, as_json=given.json)


def runs(given: argparse.Namespace, progress: Progress, name: str, shape: Shape) -> tuple[int, Row]:
    """Return the false alarms in a pattern without a leak, and the steps until leaks are found in it."""
    alarms = 0
    at: dict[float, list[int]] = {percent: [] for percent in PERCENTS}
    for seed in progress.turns(given.runs):
        alarms += found(allocated(_new(name, shape), seed), given.steps) is not None
        for percent, steps in at.items():
            step = found(allocated(_new(name, shape), seed, percent=percent), LEAK_STEPS)
            steps.append(LEAK_STEPS if step is None else step)
    others = ", ".join(f"{percent:g} %: {max(steps)}" for percent, steps in at.items() if percent != PERCENTS[0])
    beside = f"median {statistics.median(at[PERCENTS[0]]):g}; {others}"
    limit = FOUND_STEPS if name in SHAPES else None
    what = f"{name}: leak of {PERCENTS[0]:g} % in 1,000 steps, latest found at"
    return alarms, Row(what, max(at[PERCENTS[0]]), "steps", beside, limit=limit)


def found(series: Iterator[int], steps: int) -> int | None:
    """Return the step in which the detector finds the leak; None if it finds none within `steps`."""
    trend = Trend()
    for step, value in enumerate(islice(series, steps)):
        if trend.add(value) is not None:
            return step
    return None


def costs(given: argparse.Namespace) -> list[Row]:
    """Yield the CPU time of a look, of a guarded call, and of a value while memory rises."""
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        spent = place.torch().exec(COSTS, rounds=1000)
    us = {name: 1e6 * statistics.median(values) for name, values in spent.items()}
    rising = {name: rising_seconds(shape) for name, shape in {**SHAPES, **hard_shapes()}.items()}
    dearest = max(rising, key=lambda name: sum(rising[name]))
    mean, longest = 1e6 * statistics.fmean(rising[dearest]), 1e6 * max(map(max, rising.values()))
    base = 1e6 * statistics.median(regression_seconds() for _ in range(20))
    regression = f"linear regression of {WINDOW} values"
    return [
        compared("look, one device", us["look"], "µs", "memory_stats()", us["memory_stats"], LOOK_RATIO),
        compared("guarded call without an error", us["guard"], "µs", "memory_stats()", us["memory_stats"], GUARD_RATIO),
        compared(f"value while memory rises, mean ({dearest})", mean, "µs", regression, base, RISING_RATIO),
        compared("value while memory rises, longest", longest, "µs", regression, base),
    ]


def rising_seconds(shape: Shape) -> list[float]:
    """Return the CPU seconds of each value that is added to a full window while the series rises."""
    trend, taken = Trend(), []
    for value in islice(allocated(shape, 0, percent=2.0), 600):
        started = time.thread_time()
        trend.add(value)
        taken.append(time.thread_time() - started)
    return taken[300:]


def regression_seconds() -> float:
    """Return the CPU seconds of one linear regression of a window."""
    values = list(islice(allocated(SHAPES["batches of many lengths"], 0, percent=2.0), WINDOW))
    started = time.thread_time()
    statistics.linear_regression(range(WINDOW), values)
    return time.thread_time() - started


def _new(name: str, shape: Shape) -> Shape:
    """Return a new pattern for a run, because the hard patterns have state."""
    return hard_shapes().get(name, shape)


if __name__ == "__main__":
    raise SystemExit(main())
