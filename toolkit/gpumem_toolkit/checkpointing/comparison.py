"""The result of `compare_checkpointing`, as a table."""

from __future__ import annotations

from dataclasses import dataclass

from gpumem_client.wire.units import ShownAsText, human_bytes

_NAMES_SHOWN = 3


@dataclass(frozen=True, slots=True)
class CheckpointingRow:
    """One training step with some of the blocks checkpointed."""

    every: int | None
    """1 checkpoints every block, 2 every second one from the first on; None checkpoints none."""
    blocks: int
    """Number of checkpointed blocks."""
    seconds: float | None
    """The median of the runs; None if the step ran out of memory."""
    peak_bytes: int | None
    """The peak above the start; None without CUDA."""
    out_of_memory: bool = False
    differs: tuple[str, ...] = ()
    """The results (`loss`, `gradient of …`, `buffer …`) that differ from the first row that ran; in that row, between
    two runs."""

    @property
    def name(self) -> str:
        """`none`, `every block`, `1 of 2 blocks`."""
        if self.every is None:
            return "none"
        return "every block" if self.every == 1 else f"1 of {self.every} blocks"


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
        return not any(row.differs for row in self.rows)

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
        others = row is not none
        return (
            row.name,
            str(row.blocks),
            milliseconds,
            _against(row.seconds, none.seconds) if others else "",
            human_bytes(row.peak_bytes),
            _against(row.peak_bytes, none.peak_bytes) if others else "",
        )

    def _remarks(self) -> list[str]:
        remarks: list[str] = []
        if not self.device.startswith("cuda"):
            remarks.append(f"peak: no CUDA, the model is on {self.device}; gpumem-plan predicts it")
        ran = [row for row in self.rows if not row.out_of_memory]
        if ran and self.same_results:
            remarks.append("loss, gradients and buffers are equal to the bit in all rows")
        for row in ran:
            if row.differs:
                other = "run again" if row is ran[0] else ran[0].name
                remarks.append(f"RESULTS DIFFER ({row.name} and {other}): {_listed(row.differs)}")
        return remarks


def _listed(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return f"{', '.join(names[:_NAMES_SHOWN])}{more}"


def _against(value: float | None, base: float | None) -> str:
    return f"{value / base - 1:+.0%}" if value is not None and base else ""
