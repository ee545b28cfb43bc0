"""What all benchmarks share: their options, their progress on stderr, and the table of claims that they print.

A claim is never about a time alone. It is the ratio to another value of the same run, or a value that does not depend
on the machine's speed: lost commands, false alarms, steps, percent of error.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_PASSED = {True: "yes", False: "NO", None: ""}


@dataclass(frozen=True, slots=True)
class Row:
    """One measured value; information only, unless it has a limit.

    Attributes:
        what: The measured quantity.
        measured: The value.
        unit: Its unit; empty for a count.
        beside: The value of the same run for comparison, as text.
        ratio: `measured` divided by the value for comparison.
        spread: The lowest and the highest ratio of the parts of the measurement.
        ratio_limit: The claim: the ratio is at most this.
        limit: A claim about a value that does not depend on the machine's speed: `measured` is below this.
    """

    what: str
    measured: float
    unit: str
    beside: str = ""
    ratio: float | None = None
    ratio_limit: float | None = None
    limit: float | None = None
    spread: tuple[float, float] | None = None

    @property
    def passed(self) -> bool | None:
        """Whether the claim is true; None if the row claims nothing."""
        if self.limit is None and self.ratio_limit is None:
            return None
        below = self.limit is None or self.measured < self.limit
        return below and (self.ratio_limit is None or (self.ratio is not None and self.ratio <= self.ratio_limit))


def compared(what: str, measured: float, unit: str, beside: str, base: float, at_most: float | None = None) -> Row:
    """Return a row with the ratio of `measured` to `base`, which has the same unit; `at_most` is the claim."""
    return Row(what, measured, unit, f"{beside} ({_number(base)} {unit})", measured / base, at_most)


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` (0 to 1) of the values do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def typical(values: Sequence[float]) -> float:
    """Return the lower quartile: the value with few interruptions by other programs."""
    return percentile(values, 0.25)


class Options:
    """The command line of a benchmark: `--json`, `--quick`, `--real-gpu`, and how much it measures.

    Args:
        description: The benchmark's docstring.
        real_gpu: Whether it can run on this machine's GPUs.
    """

    def __init__(self, description: str | None, *, real_gpu: bool = True) -> None:
        self.parser = argparse.ArgumentParser(
            description=description, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        self.parser.add_argument("--json", action="store_true", help="print JSON")
        self.parser.add_argument("--quick", action="store_true", help="measure less: the run ends in under a minute")
        if real_gpu:
            self.parser.add_argument("--real-gpu", action="store_true", help="use this machine's GPUs and driver")
        self._amounts: dict[str, tuple[float, float]] = {}

    def amount(self, flag: str, usual: float, quick: float, what: str) -> None:
        """Add an option with a number, which has one default for full runs and one for `--quick`."""
        self.parser.add_argument(flag, type=type(usual), help=f"{what} (default: {usual:g}; {quick:g} with --quick)")
        self._amounts[flag.lstrip("-").replace("-", "_")] = usual, quick

    def read(self) -> argparse.Namespace:
        """Parse the command line."""
        given = self.parser.parse_args()
        for name, (usual, quick) in self._amounts.items():
            if getattr(given, name) is None:
                setattr(given, name, quick if given.quick else usual)
        return given


class Progress:
    """Prints to stderr which part of a benchmark runs, and how far a long part has come.

    Args:
        benchmark: Its name.
        parts: Number of parts.
    """

    _PAUSE_SECONDS = 5.0

    def __init__(self, benchmark: str, parts: int) -> None:
        self._benchmark = benchmark
        self._parts = parts
        self._part = 0
        self._started = self._printed = time.monotonic()

    def part(self, what: str) -> None:
        """Start the next part."""
        self._part += 1
        self._print(what)

    def turns(self, count: int) -> Iterator[int]:
        """Yield 0 to `count` - 1, and print the number at most once in five seconds."""
        for turn in range(count):
            self.at(f"{turn} of {count}")
            yield turn

    def sleep(self, seconds: float) -> None:
        """Sleep, and print the time passed at most once in five seconds."""
        started = time.monotonic()
        while (passed := time.monotonic() - started) < seconds:
            self.at(f"{passed:.0f} of {seconds:.0f} s")
            time.sleep(min(1.0, seconds - passed))

    def at(self, where: str) -> None:
        """Print how far the part has come, at most once in five seconds."""
        if time.monotonic() - self._printed >= self._PAUSE_SECONDS:
            self._print(f"  {where}")

    def _print(self, text: str) -> None:
        self._printed = time.monotonic()
        passed = f"{self._printed - self._started:4.0f} s"
        print(f"{self._benchmark} [{self._part}/{self._parts}] {passed}  {text}", file=sys.stderr, flush=True)


def show(title: str, rows: Sequence[Row], *, as_json: bool) -> int:
    """Print the table; return 1 if a claim was missed, else 0."""
    machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    if as_json:
        entries = [{**dataclasses.asdict(row), "passed": row.passed} for row in rows]
        print(json.dumps({"benchmark": title, "machine": machine, "rows": entries}, indent=1))
    else:
        print(f"{title}  ({machine})")
        lines = [("", "claim", "ratio", "measured", "compared with", "passed"), *map(_cells, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return int(any(row.passed is False for row in rows))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _cells(row: Row) -> tuple[str, ...]:
    claims = []
    if row.limit is not None:
        claims.append(f"< {row.limit:g} {row.unit}".rstrip())
    if row.ratio_limit is not None:
        claims.append(f"≤ {row.ratio_limit:g} ×")
    ratio = "" if row.ratio is None else f"{row.ratio:.3g} ×"
    if row.spread is not None:
        ratio += " ({:.3g} to {:.3g})".format(*row.spread)
    return row.what, ", ".join(claims), ratio, f"{_number(row.measured)} {row.unit}", row.beside, _PASSED[row.passed]
