"""What it costs, by the benchmarks: figures of which nothing must hold, least of all on another machine."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.claims.figures import Figures, shown
from tests.claims.place import Place
from tests.support.paths import REPOSITORY
from tests.support.waiting import patient

__all__ = ["of_a_round_trip", "of_the_reporter"]


def of_the_reporter(place: Place) -> Figures:
    """What the reporter costs the process that it observes."""
    return _benchmark(place, "benchmarks.reporter", "--seconds", "5", "--turns", "2")


def of_a_round_trip(place: Place) -> Figures:
    """How long an action takes, from POST to measured result."""
    return _benchmark(place, "benchmarks.round_trip", "--actions", "50")


def _benchmark(place: Place, module: str, *options: str) -> Figures:
    where = ("--real-gpu",) if place.node is None else ()
    ran = subprocess.run(
        [sys.executable, "-m", module, "--json", *where, *options],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=patient(300),
        check=False,
    )
    try:
        rows = json.loads(ran.stdout)["rows"]  # whether its own limits held is no matter here
    except ValueError:
        raise RuntimeError(f"{module} ended with {ran.returncode}:\n{ran.stderr[-2000:]}") from None
    return {f"{row['what']}, {row['unit']}" if row["unit"] else row["what"]: shown(row["measured"]) for row in rows}
