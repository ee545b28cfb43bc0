"""The result of `compare_checkpointing`, as a table, a dictionary or a chart."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpumem_client.wire.errors import ConfigurationError
from gpumem_client.wire.units import ShownAsText, human_bytes

_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two runs."""

    names: tuple[str, ...]
    """The results that differ: `loss`, `gradient of …`, `buffer …`."""
    largest_ratio: float | None
    """The largest distance, divided by the norm of the first run's tensor. None if shapes differ."""


@dataclass(frozen=True, slots=True)
class CheckpointingRow:
    """One training step with some of the blocks checkpointed."""

    every: int | None
    """1 checkpoints every block, 2 every second one, starting with the first; None checkpoints none."""
    blocks: int
    """Number of checkpointed blocks."""
    seconds: float | None
    """The median of the runs; None if the step ran out of memory."""
    peak_bytes: int | None
    """The peak above the start, or its lower bound if it is not `exact`. None without CUDA."""
    peak_at_most_bytes: int | None
    simulated: bool = False
    """Whether the peak is a prediction of the planner."""
    out_of_memory: bool = False
    difference: Difference | None = None
    """From the results of the first row that ran; in that row, between two runs. None if they are equal."""

    @property
    def name(self) -> str:
        """`none`, `every block`, `every 2nd block`."""
        if self.every is None:
            return "none"
        return "every block" if self.every == 1 else f"every {_ordinal(self.every)} block"

    @property
    def exact(self) -> bool:
        """Whether the bounds of the peak are equal."""
        return self.peak_bytes is not None and self.peak_bytes == self.peak_at_most_bytes


@dataclass(frozen=True, slots=True)
class CheckpointingComparison(ShownAsText):
    """A training step with more and more of its blocks recomputed in backward. `str()` returns a table."""

    model: str
    device: str
    blocks: str
    """A description, such as `24 TransformerBlock in layers`."""
    repeats: int
    rows: tuple[CheckpointingRow, ...]
    """From no checkpointed blocks to all."""
    note: str = ""
    """Why the peaks are unknown; empty if they are known."""

    @property
    def same_results(self) -> bool:
        """Whether loss, gradients and buffers are equal to the bit in every row that ran."""
        return all(row.difference is None for row in self.rows)

    def __str__(self) -> str:
        rows = [("checkpointed", "blocks", "time", "", "peak", ""), *(self._cells(row) for row in self.rows)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"One training step of {self.model} on {self.device}; {self.blocks}; median of {self.repeats}"]
        for first, *others in rows:
            cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
            lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
        return "\n".join([*lines, *self._remarks()])

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON-compatible values."""
        rows = [{"name": row.name, **asdict(row), "exact": row.exact} for row in self.rows]
        return {**asdict(self), "same_results": self.same_results, "rows": rows}

    def figure(self, path: str | os.PathLike[str] | None = None) -> Any:
        """Return a `matplotlib.figure.Figure` with time and peak of each row as bars, and write it to `path`.

        Raises ConfigurationError without matplotlib, and OSError if the file cannot be written.
        """
        try:
            from matplotlib.figure import Figure
        except ModuleNotFoundError as error:
            raise ConfigurationError("a figure needs the Python package matplotlib: pip install matplotlib") from error
        panels = [("time, ms", [_scaled(row.seconds, 1e3) for row in self.rows])]
        if any(row.peak_bytes is not None for row in self.rows):
            simulated = " (simulated)" if any(row.simulated for row in self.rows) else ""
            panels.append((f"peak above the start, MiB{simulated}", [_scaled(r.peak_bytes, 2**-20) for r in self.rows]))
        figure = Figure(figsize=(5 * len(panels), 1.4 + 0.4 * len(self.rows)), layout="constrained")
        names = [row.name for row in self.rows]
        for i, (title, values) in enumerate(panels, 1):
            axes = figure.add_subplot(1, len(panels), i)
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
        exact = row.exact and none.exact
        return (
            row.name,
            str(row.blocks),
            milliseconds,
            _against(row.seconds, none.seconds) if row is not none else "",
            peak,
            _against(row.peak_bytes, none.peak_bytes) if exact and row is not none else "",
        )

    def _remarks(self) -> list[str]:
        remarks = [f"peak: {self.note}"] if self.note else []
        if any(row.simulated for row in self.rows):
            remarks.append("peak: simulated; what CUDA would allocate above the start")
        if any(row.peak_bytes is not None and not row.exact for row in self.rows):
            remarks.append(
                "a peak that is not measured to the byte is shown with its bounds; reset_peaks=True makes it exact"
            )
        ran = [row for row in self.rows if not row.out_of_memory]
        if ran and self.same_results:
            remarks.append("loss, gradients and buffers are equal to the bit in all rows")
        for row in ran:
            if row.difference is not None:
                other = "run again" if row is ran[0] else ran[0].name
                remarks.append(f"RESULTS DIFFER ({row.name} and {other}): {_describe(row.difference)}")
        return remarks


def _describe(difference: Difference) -> str:
    names, ratio = difference.names, difference.largest_ratio
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    size = "" if ratio is None else f", by up to {ratio:.2g} of the norm"
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}{size}"


def _against(value: float | None, base: float | None) -> str:
    return f"{value / base - 1:+.0%}" if value is not None and base else ""


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def _ordinal(number: int) -> str:
    last = number % 100
    ending = "th" if 10 < last < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
