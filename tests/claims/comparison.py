"""A claim measured in two places: every figure of either side by side, and whether they agree."""

from __future__ import annotations

import enum
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tests.claims.figures import Claim, Figure, Figures, NotHereError, Value
from tests.claims.place import Place

__all__ = ["Compared", "Measured", "Row", "Verdict", "measure"]

_THE_CLAIM = "the claim itself"


@dataclass(frozen=True, slots=True)
class Measured:
    """One claim in one place.

    Attributes:
        failed: what it raised, in one line; empty where it answered.
        trace: the same with its traceback.
        not_here: why it could not be tried.
    """

    figures: Figures = field(default_factory=dict)
    failed: str = ""
    trace: str = ""
    not_here: str = ""
    seconds: float = 0.0


def measure(claim: Claim, place: Place) -> Measured:
    """Measure it. Whatever it raises is its own affair: the place is empty for the next one then."""
    begun = time.monotonic()
    try:
        return Measured(claim.measure(place), seconds=time.monotonic() - begun)
    except NotHereError as reason:
        return Measured(not_here=str(reason), seconds=time.monotonic() - begun)
    except Exception as error:  # noqa: BLE001 - a claim that fails costs no other
        place.rest()
        line = f"{type(error).__name__}: {error}".strip().splitlines()[0]
        return Measured(failed=line, trace=traceback.format_exc(), seconds=time.monotonic() - begun)


class Verdict(enum.Enum):
    """What is to be said of one row."""

    NO = "NO"
    YES = "yes"
    REPORTED = "–"
    NOT_HERE = "not tried"


@dataclass(frozen=True, slots=True)
class Row:
    """One figure in both places, as text."""

    figure: str
    emulated: str
    real: str
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Compared:
    """One claim in both places; None where there is no such column."""

    claim: str
    emulated: Measured | None
    real: Measured | None

    @property
    def rows(self) -> list[Row]:
        """Every figure of either place."""
        columns = [column for column in (self.emulated, self.real) if column is not None]
        rows = []
        if any(column.failed for column in columns):
            cells = self._cells(lambda column: column.failed and f"failed: {column.failed}")
            rows.append(Row(_THE_CLAIM, *cells, Verdict.NO))
        if any(column.not_here for column in columns):
            rows.append(Row(_THE_CLAIM, *self._cells(lambda column: column.not_here), Verdict.NOT_HERE))
        whole = not rows
        for name in dict.fromkeys(name for column in columns for name in column.figures):
            seen = [column.figures.get(name) for column in columns]
            cells = self._cells(lambda column, name=name: _text(column.figures.get(name)))  # type: ignore[misc]
            rows.append(Row(name, *cells, _verdict(seen, whole=whole)))
        return rows

    @property
    def agrees(self) -> bool:
        """Whether no row says no."""
        return all(row.verdict is not Verdict.NO for row in self.rows)

    def _cells(self, text: Callable[[Measured], str]) -> tuple[str, str]:
        emulated, real = (("" if column is None else text(column)) for column in (self.emulated, self.real))
        return emulated, real


def _verdict(seen: Sequence[Figure | None], *, whole: bool) -> Verdict:
    there = [figure for figure in seen if figure is not None]
    if any(figure.wrong for figure in there):
        return Verdict.NO
    if not any(figure.known or (figure.bound is not None and len(seen) > 1) for figure in there):
        return Verdict.REPORTED
    if len(there) < len(seen):
        return Verdict.NO if whole else Verdict.REPORTED
    return Verdict.YES if all(figure.agrees_with(there[0]) for figure in there) else Verdict.NO


def _text(figure: Figure | None) -> str:
    if figure is None:
        return ""
    value = _said(figure.value)
    return f"{value} instead of {_said(figure.truth)}" if figure.wrong else value  # type: ignore[arg-type]


def _said(value: Value) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and not value.is_integer():
        return f"{value:.4g}"
    return f"{int(value):,}" if isinstance(value, (int, float)) else value
