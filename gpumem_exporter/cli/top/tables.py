"""The tables of `top`: sorted, and with a selection that survives a new reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from gpumem_exporter.cli.render.layout import Column, Layout, Order, Row
from gpumem_exporter.cli.render.node_tables import unfolded


class RowTable(DataTable[Text]):
    """Rows of one kind. The selected row stays selected when the order changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "show"),
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("g,home", "scroll_top", show=False),
        Binding("G,end", "scroll_bottom", show=False),
        Binding("space", "fold", "fold"),
        Binding("a", "fold_all", show=False),
        Binding("s", "sort", "sort"),
        Binding("r", "reverse", show=False),
    ]

    def __init__(self, columns: Sequence[Column], order: Order | None = None, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id, cursor_type="row", cell_padding=0, show_header=order is not None, show_cursor=False)
        self.order = order
        """None: the rows stay in the given order."""
        self.rows_shown: Sequence[Row] = ()
        self._all_columns = columns
        # The rows and the width of the last `show`.
        self._given: tuple[Sequence[Row], int] = ((), 0)
        self._unfolded: set[Sequence[str]] = set()
        self._layout = Layout(columns, (), 0)
        self._headings: list[tuple[Text, int]] = []

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        # In a table without rows, the cursor is at -1.
        return self.rows_shown[self.cursor_row] if 0 <= self.cursor_row < len(self.rows_shown) else None

    def show(self, rows: Sequence[Row], width: int) -> None:
        """Show rows. Only the cells that differ are drawn again, and the list stays where it was scrolled to."""
        kept = [column.name for column, _ in self._layout.columns] if width == self._given[1] else ()
        selected, self._given = self.selected, (rows, width)
        rows = self.order.sorted(rows, self._all_columns) if self.order else rows
        # Also the rows of folded jobs set the widths: the columns do not move while a job is unfolded.
        self._layout = Layout(self._all_columns, unfolded(rows), width, self.order, kept)
        rows = [one for row in rows for one in (unfolded([row]) if row["key"] in self._unfolded else [row])]
        headings = list(zip(self._layout.heading(), (width for _, width in self._layout.columns), strict=True))
        place, moved = self.cursor_row, headings != self._headings
        if moved:
            self._headings = headings
            self.clear(columns=True)
            for (heading, width), (column, _) in zip(headings, self._layout.columns, strict=True):
                self.add_column(heading, width=width + 1, key=column.name)
        if any(column.wraps for column in self._all_columns):  # the height of a row cannot change
            self.clear()
        while self.row_count > len(rows):
            self.remove_row(self.ordered_rows[-1].key)
        for index, row in enumerate(rows):
            cells = self._layout.cells(row)
            if index >= self.row_count:
                self.add_row(*cells, height=None if self.order is None else 1)
                continue
            for position, (old, new) in enumerate(zip(self.get_row_at(index), cells, strict=True)):
                if old != new or old.style != new.style:  # the comparison of texts leaves out their own style
                    self.update_cell_at(Coordinate(index, position), new)
        self.rows_shown = rows
        # A process that is folded leaves its job selected, and a row that is gone the next one.
        key = selected["key"] if selected else ()
        same = [index for index, row in enumerate(rows) if row["key"] == key[: len(row["key"])]]
        self.move_cursor(row=same[-1] if same else max(0, min(place, len(rows) - 1)), scroll=moved)

    def sort_by(self, column: str) -> None:
        """Sort by a column, from its usual end; reverse the order if it is the sort column."""
        if self.order is not None:
            is_same = column == self.order.column
            self.order = replace(self.order, reverse=not self.order.reverse) if is_same else Order(column)
            self.show(*self._given)

    def action_sort(self) -> None:
        """Sort by the next column."""
        names = [column.name for column, _ in self._layout.columns]
        if self.order is not None:
            at = names.index(self.order.column) if self.order.column in names else -1
            self.sort_by(names[(at + 1) % len(names)])

    def action_reverse(self) -> None:
        if self.order is not None:
            self.sort_by(self.order.column)

    def action_fold(self) -> None:
        """Show the processes of the selected job, or hide them."""
        if self.selected is not None:
            self._unfolded ^= {self.selected["key"][:2]}
            self.show(*self._given)

    def action_fold_all(self) -> None:
        """Show the processes of all jobs, or hide those that are shown."""
        self._unfolded = set() if self._unfolded else {row["key"] for row in self.rows_shown}
        self.show(*self._given)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self.focus()
        self.sort_by(str(event.column_key.value))

    def on_focus(self) -> None:
        self.show_cursor = True

    def on_blur(self) -> None:
        self.show_cursor = False
