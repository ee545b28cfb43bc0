"""Compares the predictions of `gpumem-exporter plan` with real training.

    python -m benchmarks.planner [--quick] [--json] [--real-gpu] [--only JOB ...] [--peaks]

Plans each job of benchmarks/planner_jobs.py on fake tensors, and runs it as a training script in a separate process.
The first part compares the peaks at one batch size on a large device. The second part takes the largest batch that the
planner predicts for a device of `--gpu` GiB with the default margin. The script must train 50 steps with it, and run
out of memory with 1.25 times the samples. All claims count bytes or runs, which do not depend on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.planner_jobs import JOBS
from gpumem_toolkit.planning.devices import DEFAULT_OVERHEAD_BYTES, Gpu
from gpumem_toolkit.planning.job import Job, parse_tensor
from gpumem_toolkit.planning.plan import Target
from gpumem_toolkit.planning.planner import plan_job
from gpumem_toolkit.planning.search import Sizing
from tests.emulation.node import GIB, EmulatedNode
from tests.support.paths import REPOSITORY

MEDIAN_PERCENT, WORST_PERCENT = 5.0, 15.0
MORE = 1.25
PEAK_STEPS, BATCH_STEPS = 4, 50
QUICK_JOBS = ["cnn-adamw-bf16"]


def main() -> int:
    options = Options(__doc__)
    options.parser.add_argument(
        "--only", nargs="+", choices=JOBS, metavar="JOB", help="jobs (default: all; two with --quick)"
    )
    options.parser.add_argument("--gpu", type=float, default=8.0, help="GiB of the device that batches are planned for")
    options.parser.add_argument("--peaks", action="store_true", help="leave out the batches, which take long")
    given = options.read()
    names = given.only or (QUICK_JOBS if given.quick else list(JOBS))
    peaks_only = given.peaks or given.quick
    progress = Progress("planner", len(names) * (1 if peaks_only else 2))
    peaks = [peak(name, given, progress) for name in names]
    batches = [] if peaks_only else [batch(name, given, progress) for name in names]
    rows = [row for found, _ in peaks for row in found] + [row for row, _, _ in batches]
    errors = [error for _, error in peaks]
    rows.append(Row("reserved peak, error, median", 100 * statistics.median(errors), "%", limit=MEDIAN_PERCENT))
    rows.append(Row("reserved peak, error, worst", 100 * max(errors), "%", limit=WORST_PERCENT))
    if batches:
        failed = sum(not trains for _, trains, _ in batches)
        trained = sum(trains for _, _, trains in batches)
        rows.append(Row(f"planned batches that do not train {BATCH_STEPS} steps", failed, "", limit=0.5))
        rows.append(Row(f"{MORE} times the samples that do train", trained, "", limit=len(batches) / 6 + 0.5))
    return show("planner", rows, as_json=given.json)


def peak(name: str, options: argparse.Namespace, progress: Progress) -> tuple[list[Row], float]:
    """Plan and measure the peaks at the job's own batch size; return the rows and the error of the reserved peak."""
    progress.part(f"peaks of {name}")
    size = JOBS[name].batch
    planned = Sizing(job(name, options.real_gpu)).peaks(size)
    trained = run(name, size, PEAK_STEPS, 80 * GIB, options.real_gpu)
    rows = []
    for kind, predicted in (("allocated", planned.allocated_bytes), ("reserved", planned.reserved_bytes)):
        measured = trained[f"{kind}_peak_bytes"]
        error = predicted / measured - 1
        beside = f"measured {measured / 2**20:.1f} MiB: {100 * error:+.2f} %"
        rows.append(Row(f"{name}, batch {size}: {kind} peak planned", predicted / 2**20, "MiB", beside=beside))
    return rows, abs(error)


def batch(name: str, options: argparse.Namespace, progress: Progress) -> tuple[Row, bool, bool]:
    """Train with the largest planned batch and with a quarter more; return the row and which of them trained."""
    progress.part(f"largest batch of {name}")
    total = int(options.gpu * GIB)
    made = plan_job(job(name, options.real_gpu), Gpu("benchmark", total), Target(), changes=False)
    more = -int(-made.largest_batch * MORE // 1)
    planned, larger = (run(name, size, BATCH_STEPS, total, options.real_gpu) for size in (made.largest_batch, more))
    reserved = planned["reserved_peak_bytes"]
    outcome = "OUT OF MEMORY" if planned["oom"] else "trains"
    error = f"{100 * (made.reserved_peak_bytes / reserved - 1):+.2f} %"
    beside = (
        f"{outcome}, {planned['retries']} flushes, reserved {reserved / 2**20:.0f} MiB ({error}); "
        f"{more}: {'out of memory' if larger['oom'] else 'trains'}"
    )
    row = Row(f"{name}: planned batch", made.largest_batch, "", beside=beside)
    return row, not planned["oom"], not larger["oom"]


def job(name: str, cudnn: bool) -> Job:
    """Return the job in the form of the planner."""
    given = JOBS[name]
    return Job(
        given.make,
        (parse_tensor(given.input),),
        (parse_tensor(given.target),),
        optimizer=given.optimizer,
        optimizer_options=given.options,
        precision=given.precision,
        attention=given.attention,
        convolution="cudnn" if cudnn else "native",
        accumulation=given.accumulation,
        loop="trainer",
    )


def run(name: str, size: int, steps: int, total_bytes: int, real_gpu: bool) -> dict[str, Any]:
    """Train in a separate process on a device of this size, and return the output of the script.

    On a real device the size limits the allocator.
    """
    command = [sys.executable, "-m", "benchmarks.planner_jobs", name, str(size), str(steps)]
    if real_gpu:
        free = str(total_bytes - DEFAULT_OVERHEAD_BYTES)
        return _answer(subprocess.run([*command, "--cudnn", "--limit", free], capture_output=True, cwd=REPOSITORY))
    with (
        tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as folder,
        EmulatedNode(Path(folder) / "node", 1, total_bytes) as node,
    ):
        return _answer(subprocess.run(command, capture_output=True, cwd=REPOSITORY, env=node.environment()))


def _answer(done: subprocess.CompletedProcess[bytes]) -> dict[str, Any]:
    lines = done.stdout.decode().strip().splitlines()
    if not lines:
        raise RuntimeError(done.stderr.decode()[-2000:])
    document: dict[str, Any] = json.loads(lines[-1])
    return document


if __name__ == "__main__":
    sys.exit(main())
