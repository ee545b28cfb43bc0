"""Order and filter of the rows of `top`. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gpumem_exporter.cli.render.columns import PROCESS_COLUMNS

Row = Mapping[str, Any]

_FILTERED = ("pid", "uuid", "workload", "command", "user", "k8s_namespace", "k8s_pod", "state")


def _number(text: object) -> tuple[tuple[int, str], ...]:
    """A sort key: `10` after `9`, `0:10` after `0:9`, and numbers before other texts."""
    parts = str(text).replace("@", ":").split(":")
    return tuple((int(part), "") if part.isascii() and part.isdecimal() else (1 << 62, part) for part in parts)


_NAMES: dict[str, Callable[[Row], Any]] = {
    "workload": lambda row: (row["workload"].casefold(), _number(row["rank"])) if row["workload"] else None,
    "gpu": lambda row: None if row["gpu"] is None else _number(row["gpu"]),
    "pid": lambda row: _number(row["pid"]),
}
_SIZES = {
    column.name.replace(" ", "-"): column
    for column in PROCESS_COLUMNS
    if column.name in ("used", "allocated", "reserved", "idle cache", "reclaimable", "fragmented", "non-torch")
}
SORTS = (*_SIZES, *_NAMES)
"""The sort columns. Sizes are sorted from the largest, names from the smallest."""


@dataclass(frozen=True, slots=True)
class View:
    """What the user of `top` has chosen to see."""

    text: str = ""
    """The filter: words that the names in a row must contain."""
    sort: str = "used"
    reverse: bool = False

    @property
    def column(self) -> str:
        """The name of the sort column."""
        return _SIZES[self.sort].name if self.sort in _SIZES else self.sort

    @property
    def mark(self) -> str:
        """The direction of the order, beside the heading of the sort column."""
        return "▼" if self._descends else "▲"

    def rows(self, rows: Sequence[Row]) -> list[Row]:
        """Return the rows that pass the filter, in order. Rows without a value come last; equal rows are by pid."""
        value: Callable[[Row], Any] = _SIZES[self.sort].value if self.sort in _SIZES else _NAMES[self.sort]
        passing = [row for row in rows if self._passes(row)]
        passing.sort(key=lambda row: (_number(row["pid"]), _number(row["gpu"])))
        known = [row for row in passing if value(row) is not None]
        known.sort(key=value, reverse=self._descends)
        return [*known, *(row for row in passing if value(row) is None)]

    @property
    def _descends(self) -> bool:
        return (self.sort in _SIZES) is not self.reverse

    def _passes(self, row: Row) -> bool:
        """Return whether the names in a row contain every word of the filter. Case is ignored."""
        names = "\n".join(str(row[name]) for name in _FILTERED if row[name] is not None).casefold()
        return all(word in names for word in self.text.casefold().split())
