"""What `watch` and `phase` cost the training thread, with real torch on the emulated node or on a real GPU.

    python -m benchmarks.observing [--json] [--real-gpu]

A step is as short as it can be, so that nothing hides behind it: gradients are there already, and the optimizer's work
on ten thousand tensors is left out. All figures are CPU time of that thread.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.claims import Row, parser, percentile, show
from benchmarks.place import Place

STALL_MILLISECONDS = 1.0
COUNT_RATIO = 1.5
PHASE_MICROSECONDS = 100.0
PHASE_RATIO = 1.0

WATCHED = """
import gc, time, statistics
from gpumem_exporter import client as gpumem
from gpumem_exporter.client._components import Watch
from gpumem_exporter.client._observed import Observed
from gpumem_exporter.client._steps import Steps

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
parameters = list(model.parameters())

def cost(work):
    begun = clock()
    work()
    return clock() - begun

def naive():
    total = 0
    for p in model.parameters():
        total += p.nbytes
        if p.grad is not None:
            total += p.grad.nbytes
        for value in optimizer.state[p].values():
            total += value.nbytes
    return total

result = {name: [] for name in ("first", "first slices", "later", "later slices", "stall", "rest", "naive", "bare")}
for _ in range(rounds):
    steps, now = Steps(), [0.0]
    watching = Watch(model, optimizer, observed=Observed(), steps=steps, clock=lambda: now[0])
    for which in ("first", "later", "later", "later"):
        now[0] += 3600
        counted_before, costs = watching.latest, []
        while watching.latest is counted_before:
            costs.append(cost(lambda: steps._tell(optimizer)))
        for name, value in (which, sum(costs)), (which + " slices", len(costs)), ("stall", max(costs)):
            result[name].append(value)
    assert watching.latest[0].parameters * 4 == sum(getattr(watching.latest[0], name) for name in
                                                    ("parameters", "gradients", "optimizer_state"))
    result["rest"] += [cost(lambda: steps._tell(optimizer)) for _ in range(200)]
    result["naive"].append(cost(naive))
    result["bare"].append(cost(lambda: sum(p.nbytes for p in parameters)) * counted / len(parameters))
    watching.close()
result["counted"] = counted
"""

PHASES = """
from gpumem_exporter import client as gpumem
import time
torch.empty(1, device="cuda")
clock = time.thread_time

def per(work):
    begun = clock()
    for _ in range(1000):
        work()
    return (clock() - begun) / 1000

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
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=20, help="counts, and turns of each (default: %(default)s)")
    options = made.parse_args()
    with Place(real_gpu=options.real_gpu, devices=1) as place:
        process = place.torch()
        rows = [*components(process, options), *phases(process, options)]
    return show("observing", rows, as_json=options.json)


def components(process: Any, options: argparse.Namespace) -> list[Row]:
    """Counts of 10,000 tensors: the first, and later ones that find everything as it was."""
    told = process.exec(WATCHED, tensors=10_000, rounds=options.rounds, timeout_seconds=300)
    counted = told.pop("counted")
    middle = {name: percentile(values, 0.5) for name, values in told.items()}
    stall, first, later = (middle[name] * 1e3 for name in ("stall", "first", "later"))
    what = f"{counted:,} tensors"
    loop = f"a loop over them that adds up nbytes ({middle['naive'] * 1e6:,.0f} µs)"
    bare = f"sum(p.nbytes for p in parameters) for as many ({middle['bare'] * 1e6:,.0f} µs)"
    slices = f"{middle['first slices']:.0f} steps a first count, {middle['later slices']:.0f} a later one"
    fastest, floor = min(told["later"]), min(told["bare"])
    return [
        Row(f"longest wait of a step for a count, {what}", stall, "ms", STALL_MILLISECONDS, slices),
        Row(f"all of a first count, {what}", first, "ms", None, loop, first / 1e3 / middle["naive"]),
        Row(f"all of a later count, {what}", later, "ms", None, loop, later / 1e3 / middle["naive"], COUNT_RATIO),
        Row(f"the same, {what}", later, "ms", None, bare, later / 1e3 / middle["bare"]),
        Row(f"the fastest of them, {what}", fastest * 1e3, "ms", None, "the fastest of those", fastest / floor),
        Row(f"share of the thread at a count in ten seconds, {what}", later / 1e4 * 100, "%", 0.1),
        Row("a step between two counts", middle["rest"] * 1e6, "µs", 5.0),
    ]


def phases(process: Any, options: argparse.Namespace) -> list[Row]:
    """One phase, both ends."""
    told = {name: percentile(values, 0.5) * 1e6 for name, values in process.exec(PHASES, rounds=options.rounds).items()}
    beside = f"memory_stats() ({told['memory_stats']:.1f} µs)"
    ratio = told["phase"] / told["memory_stats"]
    return [
        Row("a phase, both ends, one device", told["phase"], "µs", PHASE_MICROSECONDS, beside, ratio, PHASE_RATIO),
        Row("the same with a reset", told["reset"], "µs", None, beside, told["reset"] / told["memory_stats"]),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
