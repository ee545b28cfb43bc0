"""Runs loops of third-party libraries with and without a leak, and shows what finds it, when, and by which name.

    python -m benchmarks.library_leaks [--json] [--only LOOP ...]

Needs the dependency group `loops`. The loops run with real torch and the client on an emulated device of 8 GiB, beside
an exporter. A leak is named if the detector's first suspect, or the top row of `profile diff` between the steps 40 and
140, has the name of what keeps the tensors. The claims count loops and steps, which do not depend on the machine's
speed.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.claims import Options, Progress, Row, show
from benchmarks.forked import forked, on_a_node, results_to
from tests.emulation.node import GIB
from tests.support.servers.exporter_process import UNLIMITED, ExporterProcess

FOUND_STEPS = 200
PATIENCE_SECONDS = 240.0


def main() -> int:
    options = Options(__doc__, real_gpu=False)
    options.parser.add_argument("--only", nargs="+", default=[], metavar="LOOP", help="loops (default: all)")
    options.parser.add_argument("--texts", action="store_true", help="print the names to stderr")
    options.parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    given = options.read()
    if given.run:
        from benchmarks.leak_jobs import JOBS  # imports the libraries, which takes a minute

        with tempfile.TemporaryDirectory(prefix="gpumem-benchmark-") as folder:
            exporter = ExporterProcess(Path(folder), *UNLIMITED, fresh=True)
            os.environ["GPUMEM_EXPORTER_URL"] = exporter.url
            try:
                return results_to(given.only or JOBS, _run)
            finally:
                exporter.close()
    progress = Progress("library_leaks", 1)
    progress.part("loops with and without a leak")
    arguments = ["--run", *(["--only", *given.only] if given.only else [])]
    results = on_a_node("benchmarks.library_leaks", arguments, total_bytes=8 * GIB)
    rows, alarms, missed, unnamed, undiffed, leaks = [], 0, 0, 0, 0, 0
    for name, result in results.items():
        step, suspects, named = result.get("reported"), result.get("suspects") or [""], result["named"]
        if given.texts:
            print(f"\n{name}\n  {suspects[0]}\n  {result.get('difference')}", file=sys.stderr)
        if not named:
            alarms += step is not None
            said = f"false alarm in step {step}" if step else "no alarm"
            rows.append(Row(f"{name}, no leak: {result['what']}", step or 0, "", beside=result.get("error") or said))
            continue
        detected = bool(re.search(named, suspects[0]))
        diffed = bool(re.search(named, str(result.get("difference"))))
        leaks, missed, unnamed = leaks + 1, missed + (step is None), unnamed + (not detected)
        undiffed += not diffed
        verdict = f"detector: {'named' if detected else 'not named'}; diff: {'named' if diffed else 'not named'}"
        what = f"{name}, {result['what']}: reported in step"
        rows.append(Row(what, step or FOUND_STEPS, "", beside=result.get("error") or verdict, limit=FOUND_STEPS))
    rows.append(Row(f"false alarms in {len(results) - leaks} loops", alarms, "", limit=1))
    rows.append(Row(f"leaks not reported, of {leaks}", missed, "", limit=1))
    rows.append(Row(f"leaks that the detector does not name, of {leaks}", unnamed, ""))
    rows.append(Row(f"leaks that profile diff does not name, of {leaks}", undiffed, ""))
    return show("library_leaks", rows, as_json=given.json)


def _run(name: str) -> dict[str, Any]:
    from benchmarks.leak_jobs import JOBS, run

    result: dict[str, Any] = forked(partial(run, name), PATIENCE_SECONDS)
    return {**result, "what": JOBS[name].what, "named": JOBS[name].named}


if __name__ == "__main__":
    raise SystemExit(main())
