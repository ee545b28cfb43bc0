"""The table that each benchmark prints: what is claimed, what was seen, what stood beside it, whether it held."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Row", "parser", "percentile", "show"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. Without a limit it is for information."""

    what: str
    measured: float
    unit: str
    limit: float | None = None
    """The claim: measured stays under it."""
    beside: str = ""
    """What was measured beside it, on the same machine, in turns with it."""
    ratio: float | None = None
    """Measured over that."""
    ratio_limit: float | None = None
    """A claim about the ratio, which unlike the figure holds from machine to machine."""

    @property
    def held(self) -> bool | None:
        """None where nothing is claimed."""
        if self.limit is None and self.ratio_limit is None:
            return None
        figure = self.limit is None or self.measured < self.limit
        return figure and (self.ratio_limit is None or (self.ratio is not None and self.ratio <= self.ratio_limit))


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that so large a share (0 to 1) of the values does not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def parser(description: str) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--real-gpu", action="store_true", help="on this machine's GPUs, without the emulated driver")
    return made


def show(title: str, rows: Sequence[Row], *, as_json: bool) -> int:
    """Print the table; returns 1 when a claim did not hold, else 0."""
    machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
    if as_json:
        entries = [{**dataclasses.asdict(row), "held": row.held} for row in rows]
        print(json.dumps({"benchmark": title, "machine": machine, "rows": entries}, indent=1))
    else:
        print(f"{title}  ({machine})")
        lines = [("", "claim", "measured", "beside it", "held"), *map(_cells, rows)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    return int(any(row.held is False for row in rows))


def _cells(row: Row) -> tuple[str, str, str, str, str]:
    claims = []
    if row.limit is not None:
        claims.append(f"< {row.limit:g} {row.unit}")
    if row.ratio_limit is not None:
        claims.append(f"≤ {row.ratio_limit:g} ×")
    beside = f"{row.ratio:.3g} × {row.beside}" if row.ratio is not None else row.beside
    return row.what, ", ".join(claims), f"{row.measured:.3g} {row.unit}", beside, _HELD[row.held]


_HELD = {True: "yes", False: "NO", None: ""}
