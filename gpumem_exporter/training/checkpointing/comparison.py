"""What a comparison of checkpointing found: rows, as a table, as a dictionary and as a figure."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumem_exporter.client.sizes import human_bytes
from gpumem_exporter.errors import ConfigurationError
from gpumem_exporter.training.checkpointing.results import Difference

__all__ = ["CheckpointingComparison", "CheckpointingRow"]

_NAMES_TOLD = 3


@dataclass(frozen=True, slots=True)
class CheckpointingRow:
    """One training step with some of the blocks under checkpoints.

    Attributes:
        every: each of which block, counted from the first, is checkpointed: 1 is each; None: none.
        blocks: how many that is.
        seconds: the median of the runs; None where there was not enough memory.
        peak_bytes: allocated at most above what was allocated before the step; where not `exact`, the largest value
            that was seen. None where unknown: without CUDA.
        peak_at_most_bytes: the peak is not above it; None where that is unknown.
        simulated: the peak is what CUDA would allocate by the planner's simulation.
        out_of_memory: the device had not enough.
        difference: from the results of the first row that ran, and, in that row, between two runs of it; None where
            they are the same.
    """

    every: int | None
    blocks: int
    seconds: float | None
    peak_bytes: int | None
    peak_at_most_bytes: int | None
    simulated: bool = False
    out_of_memory: bool = False
    difference: Difference | None = None

    @property
    def name(self) -> str:
        """`none`, `every block`, `every 2nd block`."""
        if self.every is None:
            return "none"
        return "every block" if self.every == 1 else f"every {_ordinal(self.every)} block"

    @property
    def exact(self) -> bool:
        """The peak is known, not only bounded."""
        return self.peak_bytes is not None and self.peak_bytes == self.peak_at_most_bytes


@dataclass(frozen=True, slots=True)
class CheckpointingComparison:
    """The same training step with more and more of its blocks recomputed in backward. `str()` gives a table.

    Attributes:
        model: its class.
        device: on which it ran.
        blocks: what is repeated: `24 TransformerBlock in layers`.
        repeats: runs of each, beside the first one, that were timed.
        rows: without checkpoints first, all blocks last.
        note: why no peak is known; empty where one is.
    """

    model: str
    device: str
    blocks: str
    repeats: int
    rows: tuple[CheckpointingRow, ...]
    note: str = ""

    @property
    def same_results(self) -> bool:
        """Loss, gradients and buffers are the same to the bit in every row that ran."""
        return all(row.difference is None for row in self.rows)

    def __str__(self) -> str:
        rows = [("checkpointed", "blocks", "time", "", "peak", ""), *(self._cells(row) for row in self.rows)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines = [f"One training step of {self.model} on {self.device}; {self.blocks}; median of {self.repeats}"]
        for first, *others in rows:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        return "\n".join([*lines, *self._remarks()])

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "model": self.model,
            "device": self.device,
            "blocks": self.blocks,
            "repeats": self.repeats,
            "same_results": self.same_results,
            "note": self.note,
            "rows": [{"name": row.name, **asdict(row), "exact": row.exact} for row in self.rows],
        }

    def figure(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Time and peak of each row as bars: a `matplotlib.figure.Figure`, written to `path` where one is given.

        Raises:
            ConfigurationError: matplotlib is missing (`pip install 'gpumem-exporter[plot]'`).
            OSError: the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ConfigurationError(
                "a figure needs the Python package matplotlib: pip install 'gpumem-exporter[plot]'"
            ) from error
        panels = [("time, ms", [_scaled(row.seconds, 1e3) for row in self.rows])]
        if any(row.peak_bytes is not None for row in self.rows):
            simulated = " (simulated)" if any(row.simulated for row in self.rows) else ""
            panels.append((f"peak above the start, MiB{simulated}", [_scaled(r.peak_bytes, 2**-20) for r in self.rows]))
        figure = Figure(figsize=(5 * len(panels), 1.4 + 0.4 * len(self.rows)), layout="constrained")
        names = [row.name for row in self.rows]
        for place, (title, values) in enumerate(panels):
            axes = figure.add_subplot(1, len(panels), place + 1)
            bars = axes.barh(names, [value or 0 for value in values])
            axes.bar_label(bars, [self._label(row, v) for row, v in zip(self.rows, values, strict=True)], padding=3)
            axes.invert_yaxis()
            axes.margins(x=0.15)
            axes.set_title(title)
        figure.suptitle(f"{self.model} on {self.device}: {self.blocks}")
        if path is not None:
            figure.savefig(Path(path))
        return figure

    @staticmethod
    def _label(row: CheckpointingRow, value: float | None) -> str:
        if value is None:
            return "out of memory" if row.out_of_memory else "unknown"
        return f"{value:.4g}"

    def _cells(self, row: CheckpointingRow) -> tuple[str, ...]:
        none = self.rows[0]
        if row.out_of_memory:
            return row.name, str(row.blocks), "-", "", "out of memory", ""
        milliseconds = "-" if row.seconds is None else f"{row.seconds * 1e3:.1f} ms"
        peak = human_bytes(row.peak_bytes)
        if row.peak_bytes is not None and not row.exact:
            most = row.peak_at_most_bytes
            peak = f"{peak} at least" if most is None else f"{peak} to {human_bytes(most)}"
        bounded = not (row.exact and none.exact)
        return (
            row.name,
            str(row.blocks),
            milliseconds,
            "" if row is none else _against(row.seconds, none.seconds),
            peak,
            "" if row is none or bounded else _against(row.peak_bytes, none.peak_bytes),
        )

    def _remarks(self) -> list[str]:
        told = [f"peak: {self.note}"] if self.note else []
        if any(row.simulated for row in self.rows):
            told.append("peak: simulated, what CUDA would allocate above the start; no CUDA was used")
        if any(row.peak_bytes is not None and not row.exact for row in self.rows):
            told.append("a peak below an earlier one of the process is bounded only; reset_peaks=True makes it exact")
        ran = [row for row in self.rows if not row.out_of_memory]
        if ran and self.same_results:
            told.append("loss, gradients and buffers are the same to the bit in all of them")
        for row in ran:
            if row.difference is not None:
                other = "run again" if row is ran[0] else ran[0].name
                told.append(f"NOT THE SAME ({row.name} and {other}): {_in_words(row.difference)}")
        return told


def _in_words(difference: Difference) -> str:
    names, ratio = difference.names, difference.largest_ratio
    more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
    size = "" if ratio is None else f", by up to {ratio:.2g} of the norm"
    return f"{', '.join(names[:_NAMES_TOLD])}{more}{size}"


def _against(value: float | None, base: float | None) -> str:
    return f"{value / base - 1:+.0%}" if value is not None and base else ""


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _ordinal(number: int) -> str:
    last = number % 100
    ending = "th" if 10 < last < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
