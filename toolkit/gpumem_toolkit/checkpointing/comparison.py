"""The result of `compare_checkpointing`, as a table."""

from __future__ import annotations

from dataclasses import dataclass

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
        remarks: list[str] = []
        if not self.device.startswith("cuda"):
            remarks.append(f"peak: no CUDA, the model is on {self.device}; gpumem-plan predicts it")
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


def _ordinal(number: int) -> str:
    last = number % 100
    ending = "th" if 10 < last < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"
