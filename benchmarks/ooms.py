"""Runs jobs with third-party libraries out of memory, and applies the first advice of each diagnosis.

    python -m benchmarks.ooms [--json] [--only JOB ...]

Needs the dependency group `loops`. The jobs run with real torch on an emulated device of 2 GiB, and again as the first
advice says. An advice is right if it changes the cause. The claims count jobs, which do not depend on the machine's
speed.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from typing import Any

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.forked import forked, on_a_node, results_to
from tests.emulation.node import GIB

PATIENCE_SECONDS = 300.0


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.parser.add_argument("--only", nargs="+", default=[], metavar="JOB", help="jobs (default: all)")
    options.parser.add_argument("--texts", action="store_true", help="print the diagnoses to stderr")
    options.parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given = options.read()
    if given.run:
        from benchmarks.oom_jobs import JOBS  # imports the libraries, which takes a minute

        return results_to(given.only or JOBS, _with_advice)
    progress = Progress("ooms", 1)
    progress.part("running out of memory, and following the first advice")
    results = on_a_node(
        "benchmarks.ooms", ["--run", *(["--only", *given.only] if given.only else [])], total_bytes=2 * GIB
    )
    rows, wrong, failed = [], 0, 0
    for name, result in results.items():
        first = (result.get("kinds") or ["none"])[0]
        right, runs = first in result["right"], result.get("followed", {}).get("out_of_memory") is False
        wrong, failed = wrong + (not right), failed + (not runs)
        error = result.get("error") or result.get("followed", {}).get("error") or ""
        verdict = f"{first}: {'right' if right else 'wrong'}, then it {'runs' if runs else 'does not run'}. {error}"
        rows.append(Row(f"{name}: {result['cause']}", float(right and runs), "", beside=verdict.rstrip(". ")))
        if given.texts:
            print(f"\n{name}: {result.get('text')}", file=sys.stderr)
    rows.append(Row(f"wrong first advice, of {len(results)}", wrong, "", limit=1))
    rows.append(Row(f"jobs that do not run with the first advice, of {len(results)}", failed, "", limit=1))
    return show("ooms", rows, as_json=given.json)


def _with_advice(name: str) -> dict[str, Any]:
    """Run a job, and again with its first advice."""
    from benchmarks.oom_jobs import JOBS, run

    result: dict[str, Any] = forked(partial(run, name, ""), PATIENCE_SECONDS)
    if result.get("kinds"):
        result["followed"] = forked(partial(run, name, result["kinds"][0]), PATIENCE_SECONDS)
    return {**result, "cause": JOBS[name].cause, "right": JOBS[name].right}


if __name__ == "__main__":
    raise SystemExit(main())
