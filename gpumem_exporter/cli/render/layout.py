"""Columns of a table, and their layout in the width of a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from gpumem_client.wire.units import UNKNOWN, human_bytes, short_bytes
from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

Document = Mapping[str, Any]

_READABLE_WIDTH = 22
"""Columns that are cut get this width before optional columns are added."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column: its heading, the value of a row, and its place in a narrow terminal."""

    name: str
    value: Callable[[Document], int | str | None]
    """A number of bytes, or a text; None if it is unknown, and an empty text for a blank cell."""
    rank: int = 0
    """Columns with rank 0 are always shown. The others are added in the order of their ranks while there is space."""
    left: bool = False
    short: str = ""
    """The heading if the terminal is too narrow for all headings, if it is another one."""
    style: str = ""
    """The style of the heading: the color of this memory in the bars."""
    cell_style: Callable[[Document], str] = lambda _: ""
    cut: int = 0
    """The width to which longer values are cut if the terminal has no space for them; 0 if they are not cut."""
    sparse: bool = False
    """The column is shown only if a row has a value."""
    draw: Callable[[Document, int], Text] | None = None
    """Draws the cell of a row, which has a width from `least` to `most`, instead of its value."""
    least: int = 0
    most: int = 0


class Layout:
    """The columns that fit in a width, and their cells. A cell has the width of its column and a gap.

    All rows set the widths, so that the columns do not move when a list is scrolled or filtered. `compact` shows sizes
    such as `1.5G` instead of `1.5 GiB`. `keep` is the name of a column that is always shown.
    """

    def __init__(
        self, columns: Sequence[Column], rows: Sequence[Document], width: int, *, compact: bool = False, keep: str = ""
    ) -> None:
        self._compact, self._width = compact, width
        known = [
            column
            for column in columns
            if not column.sparse or any(column.value(row) not in (None, "") for row in rows)
        ]
        for self._short in (False, True):
            natural = {column.name: self._natural_width(column, rows) for column in known}
            least = {
                column.name: column.least if column.draw else min(column.cut or 1000, natural[column.name])
                for column in known
            }
            shown = {column.name: least[column.name] for column in known if not column.rank or column.name == keep}
            left = width + 1 - sum(shown.values()) - len(shown)  # no gap is needed after the last column
            if left >= 0:
                break
        # A name that can be read is worth more than another column.
        left = _grow(shown, {name: min(natural[name], _READABLE_WIDTH) for name in shown}, left)
        for column in sorted(known, key=lambda column: column.rank):
            if column.name not in shown and least[column.name] < left:
                shown[column.name] = least[column.name]
                left -= least[column.name] + 1
        _grow(shown, natural, left)
        self.columns = [(column, shown[column.name]) for column in known if column.name in shown]
        """The shown columns and their widths, without the gap."""

    def heading(self, sort: str = "", mark: str = "") -> list[Text]:
        """Return the cells of the heading. The column named `sort` has a mark."""
        cells = []
        for column, width in self.columns:
            name = self._name(column)
            text = name if column.left else name.rjust(width)
            style = f"bold {column.style}{' underline' if column.name == sort else ''}"
            cells.append(cell(plain(f"{text}{mark if column.name == sort else ''}", style), width + 1))
        return cells

    def cells(self, row: Document) -> list[Text]:
        """Return the cells of a row."""
        return [
            cell(
                column.draw(row, width) if column.draw else plain(self._text(column, row), column.cell_style(row)),
                width,
                right=not column.left,
                gap=1,
            )
            for column, width in self.columns
        ]

    def lines(self, rows: Iterable[Document], sort: str = "", mark: str = "") -> Iterator[Text]:
        """Yield the heading, and a line for each row."""
        for cells in (self.heading(sort, mark), *map(self.cells, rows)):
            line = plain("").join(cells)
            line.truncate(self._width, overflow="crop")
            yield line

    def _natural_width(self, column: Column, rows: Sequence[Document]) -> int:
        texts = () if column.draw else (self._text(column, row) for row in rows)
        # Nearly all are plain ASCII, and a node may have hundreds of rows.
        widths = (len(text) if text.isascii() else plain(text).cell_len for text in texts)
        return max(len(self._name(column)), column.least, column.most, *widths)

    def _name(self, column: Column) -> str:
        return column.short if self._short and column.short else column.name

    def _text(self, column: Column, row: Document) -> str:
        value = column.value(row)
        if isinstance(value, int):
            return short_bytes(value) if self._compact else human_bytes(value)
        return UNKNOWN if value is None else value


def _grow(widths: dict[str, int], most: Mapping[str, int], left: int) -> int:
    """Give the columns that are left to the widths in turn, up to `most`. Return what is left then."""
    while left > 0 and (growing := [name for name, width in widths.items() if width < most[name]]):
        for name in growing[:left]:
            widths[name] += 1
            left -= 1
    return left


def cell(text: Text, width: int, *, right: bool = False, gap: int = 0) -> Text:
    """Return a text in `width` columns and a gap. A text that is too long is cut, with an ellipsis."""
    text.truncate(width, overflow="ellipsis")
    missing = width - text.cell_len
    text.pad_left(missing if right else 0)
    text.pad_right(gap + (0 if right else missing))
    return text


def chosen(among: Sequence[Column], *names: str) -> list[Column]:
    """Return the columns with these names, in this order. All of them are always shown."""
    by_name = {column.name: replace(column, rank=0) for column in among}
    return [by_name[name] for name in names]
