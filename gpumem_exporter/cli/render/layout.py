"""Columns of a table, and their layout in the width of a terminal."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, short_bytes
from gpumem_exporter.cli.render.terminal import plain, table
from gpumem_exporter.page.words import WORDS

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

Row = Mapping[str, Any]
"""A row of a table: a document of the exporter with what the terminal adds."""

# The width below which headings are short.
_NARROW = 100
# The width to which a drawing grows.
_DRAWN_MOST = 60
# A column with a rank above the first leaves so much space for names.
_USUAL, _FOR_NAMES = 8, 14


def natural(text: object) -> list[tuple[int, str]]:
    """Return a sort key without case: `10` after `9`, `node10` after `node9`, and numbers before other texts."""
    parts = re.split(r"(\d+)", str(text).casefold())
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in parts]


def _is_known(value: object) -> bool:
    return value not in (None, "")


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, the value of a row, and its place in a narrow terminal."""

    name: str
    """The key of its heading in `WORDS`, or the heading itself."""
    value: Callable[[Row], int | str | None]
    """A number of bytes, or a text; None if it is unknown, and an empty text for a blank cell."""
    rank: int = 0
    """Columns with rank 0 are always shown. The others are added in the order of their ranks while there is space."""
    space: int = 6
    """The least width. A column grows to its longest value while there is space, and longer values are cut."""
    short: str = ""
    """The heading in a narrow terminal, if it is another one."""
    key: Callable[[Row], Any] | None = None
    """The value by which rows are sorted, if it is another one."""
    left: bool = False
    wraps: bool = False
    """A longer text has several lines."""
    style: Callable[[Row], str] = lambda _: ""
    sparse: bool = False
    """The column is shown only if a row has a value."""
    draw: Callable[[Row, int], Text] | None = None
    """Draws the cell of a row in its width, instead of its value."""


@dataclass(frozen=True, slots=True)
class Order:
    """The order of rows: by a column, names and times from the smallest, sizes from the largest, or the reverse."""

    column: str
    reverse: bool = False

    def descends(self, columns: Iterable[Column]) -> bool:
        """Return whether the largest value is first."""
        return (not self._column(columns).left) is not self.reverse

    def sorted(self, rows: Iterable[Row], columns: Iterable[Column]) -> list[Row]:
        """Return rows in order. Rows without a value are last; equal rows keep their order."""
        column = self._column(columns)
        keyed = [((column.key or column.value)(row), row) for row in rows]
        known = [(natural(value) if isinstance(value, str) else value, row) for value, row in keyed if _is_known(value)]
        known.sort(key=operator.itemgetter(0), reverse=self.descends(columns))
        return [*(row for _, row in known), *(row for value, row in keyed if not _is_known(value))]

    def _column(self, columns: Iterable[Column]) -> Column:
        return next(column for column in columns if column.name == self.column)


class Layout:
    """The columns that fit in a width, and their cells.

    Which columns are shown depends on the width only, except for sparse ones. A live table names in `kept` the columns
    that it shows already: no row pushes them out while a person reads. A size in the list `incomplete` of its row is
    shown as a lower bound; a row with `dim` is dimmed. The column of the order is always shown.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Row],
        width: int,
        order: Order | None = None,
        kept: Container[str] = (),
    ) -> None:
        sort = order.column if order else ""
        mark = "" if order is None else "▼" if order.descends(columns) else "▲"
        self._names = {}
        known = [
            each
            for each in columns
            if not each.sparse or each.name in kept or any(_is_known(each.value(row)) for row in rows)
        ]
        widths: dict[str, int] = {}
        left = width + 1  # no gap is needed after the last column
        for column in sorted(known, key=lambda c: (c.rank > 0 and c.name != sort, c.name not in kept, c.rank)):
            label = WORDS[column.name]["label"] if column.name in WORDS else column.name
            name = column.short if width < _NARROW and column.short else label
            self._names[column.name] = name + (mark if column.name == sort else "")
            least = max(column.space, len(self._names[column.name]))
            if column.name == sort or not column.rank or least + _FOR_NAMES * (column.rank > _USUAL) < left:
                widths[column.name] = least
                left -= least + 1
        shown = [column for column in known if column.name in widths]
        wanted: dict[str, int] = {}
        for column in shown:
            texts = () if column.draw else (self._text(column, row) for row in rows)
            # Nearly all are plain ASCII, and a node may have hundreds of rows.
            longest = max((len(text) if text.isascii() else plain(text).cell_len for text in texts), default=0)
            wanted[column.name] = max(longest, _DRAWN_MOST if column.draw else 0) - widths[column.name]
        # Names first, then the shortest: most columns have their longest value.
        for column in sorted(shown, key=lambda c: (c.rank > 0 or c.draw is not None, wanted[c.name])):
            more = max(0, min(wanted[column.name], left))
            widths[column.name] += more
            left -= more
        self.columns = [(column, widths[column.name]) for column in shown]
        """The shown columns and their widths, without the gap."""

    def heading(self) -> list[Text]:
        """Return the cells of the heading. The column of the order has a mark."""
        cells = []
        for column, width in self.columns:
            name = self._names[column.name]
            style = "bold underline" if name.endswith(("▼", "▲")) else "bold"
            cells.append(cell(plain(name, style), width, right=not column.left))
        return cells

    def cells(self, row: Row) -> list[Text]:
        """Return the cells of a row, each as wide as its column unless it wraps."""
        found = []
        for column, width in self.columns:
            text = column.draw(row, width) if column.draw else plain(self._text(column, row), column.style(row))
            if row.get("dim"):
                text.stylize("dim")
            found.append(text if column.wraps else cell(text, width, right=not column.left))
        return found

    def table(self, rows: Iterable[Row], *, heading: bool = True) -> Table:
        """Return the table that a command prints."""
        names = self.heading() if heading else [""] * len(self.columns)
        sides = ("wrap" if column.wraps else "left" for column, _ in self.columns)
        return table("", list(zip(names, sides, strict=True)), map(self.cells, rows))

    def _text(self, column: Column, row: Row) -> str:
        value = column.value(row)
        if isinstance(value, int):
            least = "≥" if f"{column.name}_bytes" in row.get("incomplete", ()) else ""
            return least + short_bytes(value)
        return UNKNOWN if value is None else value


def cell(text: Text, width: int, *, right: bool = False) -> Text:
    """Return a text in `width` columns. A text that is too long is cut, with an ellipsis."""
    text.truncate(width, overflow="ellipsis")
    missing = width - text.cell_len
    text.pad_left(missing if right else 0)
    text.pad_right(0 if right else missing)
    return text
