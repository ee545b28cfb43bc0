"""Text cut and padded to an exact number of terminal columns, and the color of scarce memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpumem_exporter.cli.render.terminal import plain

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["beside", "cell", "join_lines", "line", "scarce_style", "width_of"]

_SCARCE = ((0.05, "bold red"), (0.1, "bold yellow"))
"""Style if less than this share of the memory is available. The live page and the dashboards have the same limits."""


def width_of(values: Iterable[str], least: int = 0) -> int:
    """Return the width of the widest value, at least `least`."""
    # Nearly all are plain ASCII, and a node may have hundreds of rows.
    return max((least, *(len(value) if value.isascii() else plain(value).cell_len for value in values)))


def cell(value: str | Text, width: int, *, right: bool = False, style: str = "") -> Text:
    """Return a value in `width` columns. A value that is too long is cut, with an ellipsis."""
    text = plain(value, style) if isinstance(value, str) else value.copy()
    text.truncate(max(0, width), overflow="ellipsis")
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


def beside(left: Text, right: Text, width: int) -> Text:
    """Return two texts at the two ends of a line. If there is no space for both, the right one is left out."""
    if width - left.cell_len - 1 < right.cell_len:
        return cell(left, width)
    return line([cell(left, width - right.cell_len), right], width, gap="")


def join_lines(lines: Sequence[Text]) -> Text:
    """Return lines joined into one text that does not wrap."""
    from rich.text import Text

    joined = Text("\n").join(lines)
    joined.no_wrap, joined.overflow = True, "crop"
    return joined


def scarce_style(free: float | None, total: float | None) -> str:
    """Return the style while `free` of `total` bytes are free; empty if that is enough or unknown."""
    if free is None or total is None:
        return ""
    return next((style for part, style in _SCARCE if free < part * total), "")
