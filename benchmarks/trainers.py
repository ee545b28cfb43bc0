"""Trains with the trainers of libraries without and with this project's callback, and compares.

    python -m benchmarks.trainers [--json] [--quick] [--only JOB ...]

Needs the dependency groups `loops` and `trainers`. The CPU computes the losses, and a small tensor on an emulated
device of 8 GiB makes the callback measure. Losses and exceptions must be the same, and the steps, in pairs that
alternate, take at most 1.05 times as long. The step time is CPU time of the process, which other programs do not
change.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.forked import forked, on_a_node, results_to
from tests.emulation.node import GIB

PATIENCE_SECONDS = 600.0


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.amount("--pairs", 30, 8, "pairs of trainings without and with the callback, of each job")
    options.parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="jobs (default: all)")
    options.parser.add_argument("--texts", action="store_true", help="print the diagnoses to stderr")
    options.parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given = options.read()
    if given.run:
        from benchmarks.trainer_jobs import JOBS, run  # imports the libraries, which takes a minute

        return results_to(given.only or JOBS, lambda name: forked(partial(run, name, given.pairs), PATIENCE_SECONDS))
    progress = Progress("trainers", 1)
    progress.part("training without and with the callback")
    only = ["--only", *given.only] if given.only else []
    results = on_a_node("benchmarks.trainers", ["--run", "--pairs", str(given.pairs), *only], total_bytes=8 * GIB)
    rows = []
    for name, result in results.items():
        if "error" in result:
            rows.append(Row(f"{name}: failed", 1, "", beside=result["error"], limit=1))
            continue
        if given.texts:
            print(f"\n{name}\n{result.get('text')}", file=sys.stderr)
        wrong = result["differences"]
        rows.append(Row(f"{name}: differences", len(wrong), "", beside=", ".join(wrong) or result["checked"], limit=1))
        if "ratios" in result:
            ratio = statistics.median(result["ratios"])
            what = f"{name}: CPU of a step, median of {len(result['ratios'])} pairs"
            rows.append(Row(what, result["step_ms"], "ms", beside="without", ratio=ratio, ratio_limit=1.05))
    return show("trainers", rows, as_json=given.json)


if __name__ == "__main__":
    raise SystemExit(main())
