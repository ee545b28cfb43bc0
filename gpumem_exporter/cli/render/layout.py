"""Columns of a table, and their layout in the width of a terminal."""

from __future__ import annotations

import operator
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, short_bytes
from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

Row = Mapping[str, Any]
"""A row of a table: a document of the exporter with what the terminal adds."""

# The width below which headings are short.
_NARROW = 100


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, the value of a row, and its place in a narrow terminal."""

    name: str
    """The key of its heading in the exporter's `words`."""
    value: Callable[[Row], int | str | None]
    """A number of bytes, or a text; None if it is unknown, and an empty text for a blank cell."""
    rank: int = 0
    """Columns with rank 0 are always shown. The others are added in the order of their ranks while there is space."""
    own: str = ""
    """The heading of a column that `words` does not have."""
    short: str = ""
    """The heading in a narrow terminal, if it is another one."""
    key: Callable[[Row], Any] | None = None
    """The value by which rows are sorted, if it is another one."""
    sorts: bool = True
    left: bool = False
    style: str = ""
    """The style of the heading and of sizes that are not 0."""
    style_of: Callable[[Row], str] = lambda _: ""
    sparse: bool = False
    """The column is shown only if a row has a value."""
    draw: Callable[[Row, int], Text] | None = None
    """Draws the cell of a row, which has a width from `least` to `most`, instead of its value."""
    least: int = 0
    most: int = 0
    space: int = 0
    """The width that other columns leave for it, to which longer values may be cut; by default `least`."""
    lines: int = 1
    """The number of lines that a longer text may have."""


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
        known = [pair for pair in keyed if pair[0] is not None]
        known.sort(key=operator.itemgetter(0), reverse=self.descends(columns))
        return [row for _, row in (*known, *(pair for pair in keyed if pair[0] is None))]

    def _column(self, columns: Iterable[Column]) -> Column:
        return next(column for column in columns if column.name == self.column)


class Layout:
    """The columns that fit in a width, and their cells. A cell has the width of its column and a gap.

    A size in the list `incomplete` of its row is shown as a lower bound; a row with `dim` is dimmed. The column of the
    order is always shown. `kept` are the columns of an earlier layout of a live table, which stay; None for one that is
    printed once.
    """

    def __init__(
        self,
        columns: Sequence[Column],
        rows: Sequence[Row],
        width: int,
        *,
        words: Mapping[str, Any],
        order: Order | None = None,
        kept: Container[str] | None = None,
    ) -> None:
        self._width, self._words = width, words
        sort = order.column if order else ""
        self._sort, self._mark = sort, "▼" if order and order.descends(columns) else "▲"
        stay = kept or ()
        known = [
            column
            for column in columns
            if not column.sparse or column.name in stay or any(column.value(row) not in (None, "") for row in rows)
        ]
        self._short = width < _NARROW
        # All rows set the widths: otherwise the columns would move when a list is scrolled. In a live table no row
        # decides which columns are shown: otherwise one would push out another one while a person reads.
        natural = {column.name: self._natural_width(column, rows) for column in known}
        space = {column.name: max(column.space or column.least, len(self._name(column))) for column in known}
        if kept is None:
            space = {name: min(size, natural[name]) for name, size in space.items()}
        widths = {column.name: space[column.name] for column in known if not column.rank or column.name == sort}
        left = width + 1 - sum(widths.values()) - len(widths)  # no gap is needed after the last column
        for column in sorted(known, key=lambda column: (column.name not in stay, column.rank)):
            if column.name not in widths and space[column.name] < left:
                widths[column.name] = space[column.name]
                left -= space[column.name] + 1
        widths = {name: min(size, natural[name]) for name, size in widths.items()}
        left = width + 1 - sum(widths.values()) - len(widths)
        if left < 0:
            widest = max(widths, key=lambda name: widths[name])
            widths[widest] = max(1, widths[widest] + left)
        _grow(widths, natural, left)
        self.columns = [(column, widths[column.name]) for column in known if column.name in widths]
        """The shown columns and their widths, without the gap."""

    def heading(self) -> list[Text]:
        """Return the cells of the heading. The column of the order has a mark."""
        cells = []
        for column, width in self.columns:
            name, sorts = self._name(column), column.name == self._sort
            text = name if column.left else name.rjust(width)
            style = f"bold {column.style}{' underline' if sorts else ''}"
            cells.append(cell(plain(f"{text}{self._mark if sorts else ''}", style), width + 1))
        return cells

    def cells(self, row: Row) -> list[Text]:
        """Return the cells of a row, which have several lines if a text has."""
        found = []
        for column, width in self.columns:
            style = column.style_of(row) or (column.style if column.value(row) else "")
            if column.draw:
                texts = [column.draw(row, width)]
            else:
                text = plain(self._text(column, row), style)
                texts = [text]
                if column.lines > 1 and text.cell_len > width:
                    parts = textwrap.wrap(text.plain, width, max_lines=column.lines, placeholder=" …")
                    texts = [plain(part, style) for part in parts or [""]]  # a text of spaces has no part
            for text in texts:
                if row.get("dim"):
                    text.stylize("dim")
                cell(text, width, right=not column.left, gap=1)
            found.append(plain("").append("\n").join(texts) if len(texts) > 1 else texts[0])
        return found

    def lines(self, rows: Iterable[Row], *, heading: bool = True) -> Iterator[Text]:
        """Yield the heading, and the lines of each row."""
        for cells in (*([self.heading()] if heading else []), *map(self.cells, rows)):
            parts = [text.split("\n") for text in cells]
            for number in range(max(map(len, parts))):
                line = plain("")
                for lines, (_, width) in zip(parts, self.columns, strict=True):
                    line.append_text(lines[number] if number < len(lines) else plain(" " * (width + 1)))
                line.truncate(self._width, overflow="crop")
                yield line

    def _natural_width(self, column: Column, rows: Sequence[Row]) -> int:
        texts = () if column.draw else (self._text(column, row) for row in rows)
        # Nearly all are plain ASCII, and a node may have hundreds of rows.
        widths = (len(text) if text.isascii() else plain(text).cell_len for text in texts)
        return max(len(self._name(column)), column.least, column.most, *widths)

    def _name(self, column: Column) -> str:
        label = column.own or self._words.get(column.name, {}).get("label") or column.name
        return column.short if self._short and column.short else label

    def _text(self, column: Column, row: Row) -> str:
        value = column.value(row)
        if isinstance(value, int):
            least = "≥" if f"{column.name}_bytes" in row.get("incomplete", ()) else ""
            return least + short_bytes(value)
        return UNKNOWN if value is None else value


def _grow(widths: dict[str, int], most: Mapping[str, int], left: int) -> None:
    """Give the columns that are left to the widths in turn, up to `most`."""
    while left > 0 and (growing := [name for name, width in widths.items() if width < most[name]]):
        for name in growing[:left]:
            widths[name] += 1
            left -= 1


def cell(text: Text, width: int, *, right: bool = False, gap: int = 0) -> Text:
    """Return a text in `width` columns and a gap. A text that is too long is cut, with an ellipsis."""
    text.truncate(width, overflow="ellipsis")
    missing = width - text.cell_len
    text.pad_left(missing if right else 0)
    text.pad_right(gap + (0 if right else missing))
    return text
