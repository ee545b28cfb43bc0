"""The tables of `top`: sorted, folded, and with a selection that survives a new reading."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.widgets import DataTable

from gpumem_exporter.cli.render.layout import Column, Layout, Order, Row
from gpumem_exporter.cli.render.rows import Key, arranged


class RowTable(DataTable[Text]):
    """Rows of one kind. The selected row stays selected when the order changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "show"),
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("g,home", "scroll_top", show=False),
        Binding("G,end", "scroll_bottom", show=False),
        Binding("space", "fold", "fold"),
        Binding("right,l", "fold(False)", show=False),
        Binding("left,h", "fold(True)", show=False),
        Binding("a", "fold_all", show=False),
        Binding("s", "sort(1)", "sort"),
        Binding("S", "sort(-1)", show=False),
        Binding("r", "reverse", show=False),
    ]

    def __init__(self, columns: Sequence[Column], order: Order | None = None, *, id: str) -> None:  # noqa: A002
        super().__init__(id=id, cursor_type="row", cell_padding=0, show_header=order is not None, show_cursor=False)
        self.order = order
        """None: the rows stay in the given order."""
        self.rows_shown: Sequence[Row] = ()
        self._all_columns = columns
        # The rows, words and width of the last `show`.
        self._given: tuple[Sequence[Row], Row, int] = ((), {}, 0)
        self._unfolded: set[Key] = set()
        self._layout = Layout(columns, (), 0, words={})
        self._headings: list[tuple[Text, int]] = []
        # The key of the row that the user has selected.
        self._chosen: Key | None = None
        # Where the cursor was after the last `show`.
        self._placed = 0

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        return self.rows_shown[self.cursor_row] if self.cursor_row < len(self.rows_shown) else None

    def show(self, rows: Sequence[Row], words: Row, width: int) -> None:
        """Show rows. Only the cells that differ are drawn again, and the list stays where it was scrolled to."""
        place, before = self.cursor_row, self.selected
        if place != self._placed and before is not None:  # the user has moved the cursor
            self._chosen = before["key"]
        kept = [column.name for column, _ in self._layout.columns] if self._given[2] == width else ()
        self._given = (rows, words, width)
        # Also the rows of folded jobs set the widths: the columns do not move while a job is unfolded.
        self._layout = Layout(self._all_columns, rows, width, words=words, order=self.order, kept=kept)
        rows = arranged(rows, self._all_columns, self.order, self._unfolded)
        headings = list(zip(self._layout.heading(), (width for _, width in self._layout.columns), strict=True))
        moved = headings != self._headings
        if moved:
            self._headings = headings
            self.clear(columns=True)
            for (heading, width), (column, _) in zip(headings, self._layout.columns, strict=True):
                self.add_column(heading, width=width + 1, key=column.name)
        if any(column.lines > 1 for column in self._all_columns):  # the height of a row cannot change
            self.clear()
        while self.row_count > len(rows):
            self.remove_row(self.ordered_rows[-1].key)
        for index, row in enumerate(rows):
            cells = self._layout.cells(row)
            if index >= self.row_count:
                self.add_row(*cells, height=max(text.plain.count("\n") + 1 for text in cells))
                continue
            for position, (old, new) in enumerate(zip(self.get_row_at(index), cells, strict=True)):
                if old != new or old.style != new.style:  # the comparison of texts leaves out their own style
                    self.update_cell_at(Coordinate(index, position), new)
        self.rows_shown = rows
        known = [index for index, row in enumerate(rows) if row["key"] == self._chosen]
        # After the selected row is gone, the next one is selected.
        self._placed = known[0] if known else max(0, min(place, len(rows) - 1))
        self.move_cursor(row=self._placed, scroll=moved)
        if not known and self._chosen is not None:
            self._chosen = rows[self._placed]["key"] if rows else None

    def sort_by(self, column: str) -> None:
        """Sort by a column, from its usual end; reverse the order if it is the sort column."""
        if self.order is not None and any(each.name == column and each.sorts for each in self._all_columns):
            is_same = column == self.order.column
            self.order = replace(self.order, reverse=not self.order.reverse) if is_same else Order(column)
            self.show(*self._given)

    def action_sort(self, step: int) -> None:
        names = [column.name for column, _ in self._layout.columns if column.sorts]
        if self.order is not None:
            at = names.index(self.order.column) if self.order.column in names else -1
            self.sort_by(names[(at + step) % len(names)])

    def action_reverse(self) -> None:
        if self.order is not None:
            self.sort_by(self.order.column)

    def action_fold(self, folded: bool | None = None) -> None:
        """Fold or unfold the job of the selected row; with None, the opposite of what it is."""
        row = self.selected
        if row is None or "level" not in row:  # a finding or a device
            return
        key = row["key"][:2]
        if key in self._unfolded if folded is None else folded:
            self._unfolded.discard(key)
            self._choose(key)
        else:
            self._unfolded.add(key)
            self._choose(row["key"])

    def action_fold_all(self) -> None:
        """Unfold every job, or fold all if one is unfolded."""
        self._unfolded = set() if self._unfolded else {row["key"][:2] for row in self.rows_shown if "level" in row}
        self.show(*self._given)

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        self.focus()
        self.sort_by(str(event.column_key.value))

    def on_focus(self) -> None:
        self.show_cursor = True

    def on_blur(self) -> None:
        self.show_cursor = False

    def on_click(self, event: events.Click) -> None:
        """Fold and unfold with a click on the mark before a job. Any other click selects, and a second one shows."""
        at = event.style.meta
        if at.get("column") == 0 and self._all_columns[0].name == "fold" and at.get("row", -1) >= 0:
            event.prevent_default()
            self.move_cursor(row=at["row"])
            self.action_fold()

    def _choose(self, key: Key) -> None:
        """Draw the rows again, with this row as the selected one."""
        self._chosen, self._placed = key, self.cursor_row
        self.show(*self._given)
