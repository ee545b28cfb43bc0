"""How sure and how quick the leak detector is, on many seeded runs; and what it, and a guarded step, cost.

    python -m benchmarks.leaks [--runs 100] [--steps 3000] [--json] [--real-gpu]

The runs are made up (tests/support/seeded_runs.py), on a device of 8 GiB; costs are CPU time of the training thread,
with real torch on the emulated node or on a real GPU.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import islice
from statistics import fmean, median

from benchmarks.claims import Row, parser, percentile, show
from benchmarks.leak_bounds import cache_errors, drift_errors, found_share
from benchmarks.place import Place
from gpumem_exporter.client._trend import Trend
from tests.support.seeded_runs import SHAPES, Shape, allocated, hard_shapes

FOUND_STEPS = 200
LOOK_MICROSECONDS = 100.0
RISING_MICROSECONDS = 2000.0
GUARD_MICROSECONDS = 100.0
PERCENTS = (1.0, 2.0, 5.0)

COSTS = """
from gpumem_exporter import client as gpumem
from gpumem_exporter.client._leaks import LeakDetector
import time
torch.empty(1, device="cuda")
clock = time.thread_time
detector = LeakDetector(lambda leak: None)
looks, guards = [], []
for _ in range(rounds):
    begun = clock(); detector.look(); looks.append(clock() - begun)
guard = gpumem.oom_guard(batch_size=8)
for _ in range(rounds):
    begun = clock()
    with guard:
        pass
    guards.append(clock() - begun)
result = {"looks": looks, "guards": guards}
"""


def found(series: Iterator[int], steps: int) -> int | None:
    """The step in which the detector is sure."""
    trend = Trend()
    for step, value in enumerate(islice(series, steps)):
        slope = trend.add(value)
        if slope is not None:
            return step
    return None


def rows_of(name: str, shape: Shape, runs: int, steps: int, *, claimed: bool) -> Iterator[Row]:
    """False alarms without a leak, and how soon one is found."""
    false = sum(found(allocated(_fresh(name, shape), seed), steps) is not None for seed in range(runs))
    yield Row(f"{name}: false alarms in {runs} runs of {steps} steps", false, "", 1.0)
    for percent in PERCENTS:
        sure = [found(allocated(_fresh(name, shape), seed, percent=percent), 2000) for seed in range(runs)]
        late = percentile([2000 if step is None else step for step in sure], 1.0)
        typical = median(2000 if step is None else step for step in sure)
        limit = float(FOUND_STEPS) if claimed else None
        yield Row(f"{name}: {percent:g} % in 1,000 steps, latest found at", late, "steps", limit, f"median {typical:g}")


def bounds() -> Iterator[Row]:
    """What is out of reach."""
    for steps in (FOUND_STEPS, 300):
        for name, errors in (
            ("drifting about", drift_errors(1.0, steps)),
            ("a cache that fills up to 200 MiB", cache_errors(steps)),
        ):
            what = f"{name}: 1 % in 1,000 steps, found by step {steps} by the best test there is"
            yield Row(what, 100 * found_share(errors), "%", beside=f"{errors:.1f} standard errors")


def rising_looks(shape: Shape) -> list[float]:
    """Seconds of each value that a full window takes, while the series rises."""
    trend, costs = Trend(), []
    for value in islice(allocated(shape, 0, percent=2.0), 600):
        begun = time.thread_time()
        trend.add(value)
        costs.append(time.thread_time() - begun)
    return costs[300:]


def _fresh(name: str, shape: Shape) -> Shape:
    return hard_shapes().get(name, shape)  # those remember where they are


def main(arguments: argparse.Namespace) -> int:
    """Run it all; 1 where a claim did not hold."""
    rows: list[Row] = []
    for name, shape in SHAPES.items():
        rows += rows_of(name, shape, arguments.runs, arguments.steps, claimed=True)
    for name, shape in hard_shapes().items():
        rows += rows_of(name, shape, arguments.runs, arguments.steps, claimed=False)
    rows += bounds()
    with Place(real_gpu=arguments.real_gpu, devices=1) as place:
        costs = place.torch().exec(COSTS, rounds=2000)
    rows.append(Row("a look, one device", 1e6 * median(costs["looks"]), "µs", LOOK_MICROSECONDS))
    rising = {name: rising_looks(shape) for name, shape in {**SHAPES, **hard_shapes()}.items()}
    dearest = max(rising, key=lambda name: sum(rising[name]))
    mean = 1e6 * fmean(rising[dearest])
    rows.append(Row("the same while memory rises, mean", mean, "µs", RISING_MICROSECONDS, dearest))
    rows.append(Row("the same while memory rises, longest", 1e3 * max(map(max, rising.values())), "ms"))
    rows.append(Row("a guarded run that ends well", 1e6 * median(costs["guards"]), "µs", GUARD_MICROSECONDS))
    return show("leaks", rows, as_json=arguments.json)


if __name__ == "__main__":
    options = parser(__doc__ or "")
    options.add_argument("--runs", type=int, default=20, help="seeds for each kind of run")
    options.add_argument("--steps", type=int, default=3000, help="of the runs without a leak")
    raise SystemExit(main(options.parse_args()))
