"""Measures the cost of `watch` and `phase` in the training thread, with real torch on an emulated or real GPU.

    python -m benchmarks.observing [--quick] [--json] [--real-gpu]

All values are CPU time of that thread. A step is as short as possible: the gradients exist already, and the optimizer
computes nothing. The benchmark compares, in turns, a count of 10,000 tensors by `watch` with a plain Python loop that
adds up their `nbytes`. It compares a phase, and a step between two counts, with `torch.cuda.memory_stats()`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence

from benchmarks.claims import Options, Progress, Row, compared, show
from benchmarks.place import Place
from tests.emulation.torch_process import TorchProcess

COUNT_RATIO = 5.0
REST_RATIO = 1.0
PHASE_RATIO = 2.0

WATCHED = """
import gc, time, statistics
import gpumem_toolkit as toolkit
from gpumem_toolkit.measure.components import Watch
from gpumem_client.phases.observed import Observed
from gpumem_client.hooks.steps import Steps

class Kept(torch.optim.Optimizer):
    def step(self, closure=None):
        pass

model = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(tensors // 8)]).cuda()
optimizer = Kept(model.parameters(), {})
for p in model.parameters():
    p.grad = torch.ones_like(p)
    optimizer.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
counted = sum(1 for p in model.parameters() for _ in (p, p.grad, *optimizer.state[p].values()))
gc.collect()
gc.freeze()
clock = time.thread_time

def cost(work):
    started = clock()
    work()
    return clock() - started

def naive():
    total = 0
    for p in model.parameters():
        total += p.nbytes
        if p.grad is not None:
            total += p.grad.nbytes
        for value in optimizer.state[p].values():
            total += value.nbytes
    return total

names = "count", "rest", "naive", "memory_stats"
result = {name: [] for name in names}
for _ in range(rounds):
    steps, now = Steps(), [0.0]
    watching = Watch(model, optimizer, observed=Observed(), steps=steps, clock=lambda: now[0])
    for _ in range(3):
        now[0] += 3600
        result["count"].append(cost(lambda: steps._report(optimizer)))
    assert watching.latest[0].parameters * 4 == sum(getattr(watching.latest[0], name) for name in
                                                    ("parameters", "gradients", "optimizer_state"))
    result["rest"] += [cost(lambda: steps._report(optimizer)) for _ in range(200)]
    result["naive"].append(cost(naive))
    result["memory_stats"] += [cost(torch.cuda.memory_stats) for _ in range(20)]
    watching.close()
result["counted"] = counted
"""

PHASES = """
import gpumem_client as gpumem
import time
torch.empty(1, device="cuda")
clock = time.thread_time

def per(work):
    started = clock()
    for _ in range(1000):
        work()
    return (clock() - started) / 1000

forward, exact = gpumem.phase("forward"), gpumem.phase("exact", reset_peaks=True)
def inside(phase):
    with phase:
        pass
works = {"phase": lambda: inside(forward), "reset": lambda: inside(exact), "memory_stats": torch.cuda.memory_stats}
result = {name: [] for name in works}
for _ in range(rounds):
    for name, work in works.items():
        result[name].append(per(work))
"""


def main() -> int:
    options = Options(__doc__)
    options.amount("--rounds", 20, 4, "rounds of counts and of phases")
    given = options.read()
    progress = Progress("observing", 2)
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        process = place.torch()
        rows = [*components(given, progress, process), *phases(given, progress, process)]
    return show("observing", rows, as_json=given.json)


def components(given: argparse.Namespace, progress: Progress, process: TorchProcess) -> list[Row]:
    """Counts of 10,000 tensors."""
    progress.part("counts of 10,000 tensors")
    costs = process.exec(WATCHED, tensors=10_000, rounds=given.rounds, timeout_seconds=300)
    counted = costs.pop("counted")
    us = _medians(costs)
    loop, stats = "a loop over their nbytes", "memory_stats()"
    what = f"count of {counted:,} tensors"
    return [
        compared(what, us["count"], "µs", loop, us["naive"], COUNT_RATIO),
        compared("step between two counts", us["rest"], "µs", stats, us["memory_stats"], REST_RATIO),
    ]


def phases(given: argparse.Namespace, progress: Progress, process: TorchProcess) -> list[Row]:
    """One phase, its start and its end."""
    progress.part("phases")
    us = _medians(process.exec(PHASES, rounds=given.rounds, timeout_seconds=300))
    beside, base = "memory_stats()", us["memory_stats"]
    return [
        compared("phase, start and end, one device", us["phase"], "µs", beside, base, PHASE_RATIO),
        compared("the same with reset_peaks", us["reset"], "µs", beside, base),
    ]


def _medians(costs: Mapping[str, Sequence[float]]) -> dict[str, float]:
    return {name: 1e6 * statistics.median(values) for name, values in costs.items()}


if __name__ == "__main__":
    raise SystemExit(main())
