"""Measures what memory profiles cost a job: the step time of a recording, and how long the interpreter stands still.

    python -m benchmarks.profile [--quick] [--json] [--real-gpu]

Steps of two transformers run in turns without a recording, with the recording of a profile, and with the standing
recording of `GPUMEM_OOM_PROFILE=1`, in one process with real torch. On the emulated node kernels do nothing, so a step
is all CPU: a recording costs the most there. The times of steps are CPU times. Pauses are the longest times that
another thread waits for the GIL. The benchmark compares them with a full garbage collection of the same heap, which
stops the interpreter, too.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from benchmarks.claims import Options, Progress, Row, compared, show, typical
from benchmarks.place import Place
from tests.emulation.torch_process import TorchProcess

STEP_RATIO = 1.6
NAMING_RATIO = 2.0
SNAPSHOT_RATIO = 3.0
BLOCKS = (1_000, 10_000, 100_000)
MODELS = {"a small transformer": {"layers": 2, "width": 64}, "a larger transformer": {"layers": 12, "width": 512}}

PREPARED = """
import gc, threading, time
from torch import nn
from gpumem_client.allocator.allocator import attached
from gpumem_client.profile.heap_blocks import Stacks
from gpumem_client.profile.heap_reader import HeapReader
from gpumem_client.profile.profiler import live_profile
from gpumem_client.profile.recorder import Recorder
torch.empty(1, device="cuda")
recorder, heap = Recorder(torch), HeapReader(torch, attached())
torch.cuda.memory_snapshot()

class Stalls:
    '''The longest time that a thread waited for the GIL.'''
    def __enter__(self):
        self.seconds, self._ended, started = 0.0, False, threading.Event()
        def beat():
            last = time.perf_counter()
            while not self._ended:
                started.set()
                time.sleep(0.0005)
                now = time.perf_counter()
                self.seconds, last = max(self.seconds, now - last), now
        self._thread = threading.Thread(target=beat)
        self._thread.start()
        started.wait()
        return self
    def __exit__(self, *error):
        self._ended = True
        self._thread.join()

def stall(work):
    with Stalls() as stalls:
        work()
    return stalls.seconds
"""

STEPS = """
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.normal, self.joined = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
    def forward(self, x):
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.joined(self.normal(x)).chunk(3, -1))
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.narrow(nn.functional.gelu(self.wide(x)))

model = nn.Sequential(*[Block() for _ in range(layers)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
batch = torch.empty(4, 32, width, device="cuda")
def step():
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

kinds = {"plain": lambda: None, "profile": recorder.start, "oom": recorder.start_standing}
result = {name: [] for name in kinds}
for _ in range(rounds + 1):
    for name, start in kinds.items():
        start()
        step()
        started = time.process_time()  # with autograd's threads
        for _ in range(10):
            step()
        result[name].append((time.process_time() - started) / 10)
        recorder.close()
result = {name: values[1:] for name, values in result.items()}
before = torch.cuda.memory_stats()["allocation.all.allocated"]
step()
result["allocations"] = torch.cuda.memory_stats()["allocation.all.allocated"] - before
"""

PAUSES = """
recorder.start()
kept = [torch.empty(128, device="cuda") for _ in range(blocks)]
gc.collect()
result = {name: [] for name in ("collect", "profile", "snapshot", "plain")}
for _ in range(rounds):
    result["collect"].append(stall(gc.collect))
    result["snapshot"].append(stall(lambda: heap.blocks(Stacks())))
recorder.close()
del kept  # blocks that were recorded have their stacks until they are freed
kept = [torch.empty(128, device="cuda") for _ in range(blocks)]
for _ in range(rounds):
    result["plain"].append(stall(lambda: heap.blocks(Stacks())))
    result["profile"].append(stall(lambda: live_profile(heap, "benchmark", "action")))
del kept
"""


def main() -> int:
    options = Options(__doc__)
    options.amount("--rounds", 30, 6, "rounds of ten steps of each kind")
    options.amount("--pauses", 5, 2, "rounds of pauses")
    given = options.read()
    progress = Progress("profile", len(MODELS) + len(BLOCKS))
    rows: list[Row] = []
    with Place(real_gpu=given.real_gpu, devices=1) as place:
        process = place.torch()
        process.exec(PREPARED)
        for name, model in MODELS.items():
            rows += steps(given, progress, process, name, model)
        for blocks in BLOCKS:
            rows += pauses(given, progress, process, blocks)
    return show("profile", rows, as_json=given.json)


def steps(
    given: argparse.Namespace, progress: Progress, process: TorchProcess, name: str, model: dict[str, int]
) -> list[Row]:
    """The time of a training step with and without recordings."""
    progress.part(f"steps of {name}")
    costs: dict[str, Any] = process.exec(STEPS, rounds=given.rounds, timeout_seconds=600, **model)
    allocations = costs.pop("allocations")
    us = {kind: 1e6 * typical(values) for kind, values in costs.items()}
    what = f"step of {name}, {allocations:,} allocations"
    return [
        compared(f"{what}: with the recording of a profile", us["profile"], "µs", "without", us["plain"], STEP_RATIO),
        compared(f"{what}: with the OOM profile on", us["oom"], "µs", "without", us["plain"], STEP_RATIO),
        Row(f"{what}: the recording, per allocation", (us["profile"] - us["plain"]) / allocations, "µs"),
    ]


def pauses(given: argparse.Namespace, progress: Progress, process: TorchProcess, blocks: int) -> list[Row]:
    """How long another thread waits while a snapshot or a profile is taken."""
    progress.part(f"pauses with {blocks:,} blocks")
    costs = process.exec(PAUSES, blocks=blocks, rounds=given.pauses, timeout_seconds=600)
    ms = {kind: 1e3 * statistics.median(values) for kind, values in costs.items()}
    what, beside = f"{blocks:,} blocks: longest pause", "a garbage collection"
    profile = f"{what} of a profile without a recording"
    return [
        compared(profile, ms["profile"], "ms", beside, ms["collect"], NAMING_RATIO),
        compared(f"{what} of a snapshot with stacks", ms["snapshot"], "ms", beside, ms["collect"], SNAPSHOT_RATIO),
        compared(f"{what} of a snapshot without", ms["plain"], "ms", beside, ms["collect"]),
    ]


if __name__ == "__main__":
    raise SystemExit(main())
