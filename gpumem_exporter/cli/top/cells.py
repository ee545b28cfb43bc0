"""Lines of exact width: cells cut and padded by the columns that a terminal gives their characters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["beside", "cell", "line", "whole", "width_of"]


def width_of(values: Iterable[str], least: int = 0) -> int:
    """How many columns the widest of some values takes as it is shown, `least` at least."""
    # Nearly all are plain ASCII, and a node may have hundreds of rows.
    return max((least, *(len(value) if value.isascii() else plain(value).cell_len for value in values)))


def cell(value: str | Text, width: int, *, right: bool = False, style: str = "", ellipsis: bool = True) -> Text:
    """A value in `width` columns; what is too long is cut, and says so where an ellipsis can be shown."""
    text = plain(value, style) if isinstance(value, str) else value.copy()
    text.truncate(max(0, width), overflow="ellipsis" if ellipsis else "crop")
    missing = max(0, width - text.cell_len)
    if right:
        text.pad_left(missing)
    else:
        text.pad_right(missing)
    return text


def line(cells: Sequence[Text], width: int, *, gap: str = " ") -> Text:
    """Cells in a row, no wider than the screen."""
    joined = plain(gap).join(cells)
    joined.truncate(width, overflow="crop")
    return joined


def beside(left: Text, right: Text, width: int, *, ellipsis: bool = True) -> Text:
    """Two texts at the two ends of a line; the right one gives way first where there is no room for both."""
    room = width - left.cell_len - 1
    if room < right.cell_len:
        return cell(left, width, ellipsis=ellipsis)
    return line([cell(left, width - right.cell_len, ellipsis=ellipsis), right], width, gap="")


def whole(lines: Sequence[Text]) -> Text:
    """Lines one below the other, without wrapping."""
    from rich.text import Text

    joined = Text("\n").join(lines)
    joined.no_wrap, joined.overflow = True, "crop"
    return joined
