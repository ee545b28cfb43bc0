"""Text cut and padded to an exact number of terminal columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["beside", "cell", "join_lines", "line", "width_of"]


def width_of(values: Iterable[str], least: int = 0) -> int:
    """Return the width of the widest value, at least `least`."""
    # Nearly all are plain ASCII, and a node may have hundreds of rows.
    return max((least, *(len(value) if value.isascii() else plain(value).cell_len for value in values)))


def cell(value: str | Text, width: int, *, right: bool = False, style: str = "", ellipsis: bool = True) -> Text:
    """Return a value in `width` columns. A value that is too long is cut, with an ellipsis if `ellipsis` is set."""
    text = plain(value, style) if isinstance(value, str) else value.copy()
    text.truncate(max(0, width), overflow="ellipsis" if ellipsis else "crop")
    missing = max(0, width - text.cell_len)
    if right:
        text.pad_left(missing)
    else:
        text.pad_right(missing)
    return text


def line(cells: Sequence[Text], width: int, *, gap: str = " ") -> Text:
    """Return cells in a row of at most `width` columns."""
    joined = plain(gap).join(cells)
    joined.truncate(width, overflow="crop")
    return joined


def beside(left: Text, right: Text, width: int, *, ellipsis: bool = True) -> Text:
    """Return two texts at the two ends of a line. If there is no space for both, the right one is left out."""
    room = width - left.cell_len - 1
    if room < right.cell_len:
        return cell(left, width, ellipsis=ellipsis)
    return line([cell(left, width - right.cell_len, ellipsis=ellipsis), right], width, gap="")


def join_lines(lines: Sequence[Text]) -> Text:
    """Return lines joined into one text that does not wrap."""
    from rich.text import Text

    joined = Text("\n").join(lines)
    joined.no_wrap, joined.overflow = True, "crop"
    return joined
