"""The tables of `top`: rows whose selection survives a new reading."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.binding import Binding, BindingType
from textual.coordinate import Coordinate
from textual.message import Message
from textual.widgets import DataTable

from gpumem_exporter.cli.render.layout import Column, Layout, Order
from gpumem_exporter.cli.render.rows import Key, Row


class RowTable(DataTable[Text]):
    """Rows of one kind. The selected row stays selected when the order changes."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "select_cursor", "job"),
        Binding("j", "cursor_down", show=False),
        Binding("k", "cursor_up", show=False),
        Binding("g,home", "scroll_top", show=False),
        Binding("G,end", "scroll_bottom", show=False),
        Binding("right,l", "fold(False)", show=False),
        Binding("left,h", "fold(True)", show=False),
    ]

    class Folded(Message):
        """A row is to be folded or unfolded; with None, the opposite of what it is."""

        def __init__(self, row: Row, folded: bool | None) -> None:
            super().__init__()
            self.row, self.folded = row, folded

    def __init__(self, columns: Sequence[Column], *, id: str, heading: bool = True) -> None:  # noqa: A002 - Textual's
        super().__init__(id=id, cursor_type="row", cell_padding=0, show_header=heading, show_cursor=False)
        self.all_columns = columns
        """All columns, of which a narrow terminal shows some."""
        self.rows_shown: Sequence[Row] = ()
        self.layout_shown: Layout | None = None
        self._headings: list[tuple[Text, int]] = []
        self._chosen: Key | None = None
        """The key of the row that the user has selected."""
        self._placed = 0
        """Where the cursor was after the last `show`."""

    @property
    def selected(self) -> Row | None:
        """The row under the cursor."""
        return self.rows_shown[self.cursor_row] if self.cursor_row < len(self.rows_shown) else None

    def select(self, key: Key) -> None:
        """Move the cursor to a row."""
        for index, row in enumerate(self.rows_shown):
            if row["key"] == key:
                self._chosen, self._placed = key, index
                self.move_cursor(row=index, animate=False)

    def show(
        self, rows: Sequence[Row], words: Row, width: int, order: Order | None = None, all_rows: Sequence[Row] = ()
    ) -> None:
        """Show rows. Only the cells that differ are drawn again, and the list stays where it was scrolled to.

        `all_rows` set the widths of the columns, so that these do not move while rows are unfolded.
        """
        place, before = self.cursor_row, self.selected
        if place != self._placed and before is not None:  # the user has moved the cursor
            self._chosen = before["key"]
        layout = Layout(self.all_columns, all_rows or rows, width, words=words, order=order, compact=True)
        headings = list(zip(layout.heading(), (width for _, width in layout.columns), strict=True))
        moved = headings != self._headings
        if moved:
            self._headings = headings
            self.clear(columns=True)
            for (heading, width), (column, _) in zip(headings, layout.columns, strict=True):
                self.add_column(heading, width=width + 1, key=column.name)
        if any(column.lines > 1 for column in self.all_columns):  # the height of a row cannot change
            self.clear()
        while self.row_count > len(rows):
            self.remove_row(self.ordered_rows[-1].key)
        for index, row in enumerate(rows):
            cells = layout.cells(row)
            if index >= self.row_count:
                self.add_row(*cells, height=max(text.plain.count("\n") + 1 for text in cells))
                continue
            for position, (old, new) in enumerate(zip(self.get_row_at(index), cells, strict=True)):
                if old != new:
                    self.update_cell_at(Coordinate(index, position), new)
        self.rows_shown, self.layout_shown = rows, layout
        known = [index for index, row in enumerate(rows) if row["key"] == self._chosen]
        # After the selected row is gone, the next one is selected.
        self._placed = known[0] if known else max(0, min(place, len(rows) - 1))
        self.move_cursor(row=self._placed, scroll=moved)
        if not known and self._chosen is not None:
            self._chosen = rows[self._placed]["key"] if rows else None

    def on_focus(self) -> None:
        self.show_cursor = True

    def on_blur(self) -> None:
        self.show_cursor = False

    def action_fold(self, folded: bool) -> None:
        if self.selected is not None:
            self.post_message(self.Folded(self.selected, folded))

    def on_click(self, event: events.Click) -> None:
        """Fold and unfold with a click on the mark before a job. Any other click selects, and a second one shows."""
        at = event.style.meta
        is_mark = at.get("column") == 0 and self.all_columns[0].name == "fold"
        if is_mark and 0 <= at.get("row", -1) < len(self.rows_shown):
            event.prevent_default()
            self.post_message(self.Folded(self.rows_shown[at["row"]], None))
