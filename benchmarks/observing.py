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
watched, whole, slices, rest = [], [], [], []
clock = time.thread_time
for _ in range(rounds):
    steps = Steps()
    watching = Watch(model, optimizer, observed=Observed(), steps=steps)
    costs = []
    while not watching.latest:
        begun = clock(); steps._tell(optimizer); costs.append(clock() - begun)
    watched.append(max(costs)); slices.append(len(costs)); whole.append(sum(costs))
    for _ in range(200):
        begun = clock(); steps._tell(optimizer); rest.append(clock() - begun)
    watching.close()
result = {"counted": counted, "stall": watched, "whole": whole, "slices": slices, "rest": rest}
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
    """One count of 10,000 tensors."""
    told = process.exec(WATCHED, tensors=10_000, rounds=options.rounds, timeout_seconds=300)
    stall, whole = percentile(told["stall"], 0.5) * 1e3, percentile(told["whole"], 0.5) * 1e3
    what = f"{told['counted']:,} tensors"
    steps = percentile(told["slices"], 0.5)
    return [
        Row(
            f"longest wait of a step for a count, {what}", stall, "ms", STALL_MILLISECONDS, f"{steps:.0f} steps a count"
        ),
        Row(f"all of a count, {what}", whole, "ms", None, "the longest wait of a step", whole / stall),
        Row(f"share of the thread at a count in ten seconds, {what}", whole / 1e4 * 100, "%", 0.2),
        Row("a step between two counts", percentile(told["rest"], 0.5) * 1e6, "µs", 5.0),
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
