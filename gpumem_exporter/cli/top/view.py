"""What the user of `top` has chosen to see, and the effect of each key. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpumem_exporter.cli.top.rows import SORTS, Identity, Row, arrange

__all__ = ["View"]

_LONGEST_FILTER = 200
_FAR = 1 << 30
"""More steps than any list has rows."""


@dataclass(frozen=True, slots=True)
class View:
    """Order, filter, selected row and position in the list."""

    text: str = ""
    """The filter: words that the names in a row must contain."""
    sort: str = "used"
    reverse: bool = False
    typing: str | None = None
    """The previous filter while the user types a new one; None otherwise."""
    chosen: Identity | None = None
    """The target row of an action; it follows its process when the order changes."""
    index: int = 0
    """The last position of the selected row. When its process exits, the row at this position is selected."""
    first: int = 0
    """The first row on the screen."""
    shows_help: bool = False
    shows_events: bool = False
    """The events replace the processes."""
    first_line: int = 0
    """The first line of the events on the screen."""

    @property
    def lists_processes(self) -> bool:
        """Whether the processes are on the screen."""
        return not (self.shows_help or self.shows_events)

    def rows(self, rows: Sequence[Row]) -> tuple[Row, ...]:
        """Return the listed rows, in order."""
        return arrange(rows, self.text, self.sort, reverse=self.reverse)

    def settle(self, listed: Sequence[Row], page: int) -> View:
        """Return the view with its selected row on a screen of `page` of the listed rows."""
        index, chosen = self.index, self.chosen
        if chosen is not None:
            positions = {row.identity: position for position, row in reversed(list(enumerate(listed)))}
            index = max(0, min(positions.get(chosen, index), len(listed) - 1))
            chosen = listed[index].identity if listed else chosen
        first = max(0, min(self.first, len(listed) - page))
        if chosen is not None and page > 0:
            first = max(index - page + 1, min(first, index))
        return replace(self, index=index, chosen=chosen, first=first)

    def press(self, key: str, listed: Sequence[Row], page: int) -> View:
        """Return the view after a key. A key without a function changes nothing."""
        if self.typing is not None:
            return self._type(key)
        if self.shows_help:
            return replace(self, shows_help=False)
        if key == "e" or (self.shows_events and key == "escape"):
            return replace(self, shows_events=not self.shows_events, first_line=0)
        if key == "?":
            return replace(self, shows_help=True)
        if self.shows_events:
            return replace(self, first_line=max(0, self.first_line + _steps(page).get(key, 0)))
        if key in ("s", "S"):
            position = SORTS.index(self.sort) + (1 if key == "s" else -1)
            return replace(self, sort=SORTS[position % len(SORTS)], reverse=False)
        if key == "r":
            return replace(self, reverse=not self.reverse)
        if key == "/":
            return replace(self, typing=self.text)
        if key == "escape":
            if self.chosen is not None:
                return replace(self, chosen=None, index=0, first=0)
            return replace(self, text="")
        return self._move(key, listed, page)

    def _move(self, key: str, listed: Sequence[Row], page: int) -> View:
        steps = _steps(page)
        if key not in steps or not listed:
            return self
        first = self.index if self.chosen is not None else -1 if steps[key] == 1 else 0
        index = max(0, min(first + steps[key], len(listed) - 1))
        return replace(self, index=index, chosen=listed[index].identity).settle(listed, page)

    def _type(self, key: str) -> View:
        text = self.text
        if key == "enter":
            return replace(self, typing=None)
        if key == "escape":
            return replace(self, typing=None, text=self.typing or "")
        if key == "backspace":
            text = text[:-1]
        elif key == "erase line":
            text = ""
        elif len(key) == 1 and len(text) < _LONGEST_FILTER:
            text += key
        return replace(self, text=text, first=0)


def _steps(page: int) -> dict[str, int]:
    """The number of rows that each key moves, for a screen of `page` lines."""
    return {
        **dict.fromkeys(("down", "j"), 1),
        **dict.fromkeys(("up", "k"), -1),
        **dict.fromkeys(("page down", " "), max(1, page)),
        "page up": -max(1, page),
        **dict.fromkeys(("home", "g"), -_FAR),
        **dict.fromkeys(("end", "G"), _FAR),
    }
