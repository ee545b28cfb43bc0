"""Output of text and tables: a terminal gets colors and its width, a file gets plain lines of any length."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Sequence
from typing import IO, TYPE_CHECKING, Any

from gpumem_client.wire.errors import ConfigurationError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.table import Table
    from rich.text import Text

_UNLIMITED_WIDTH = 10_000


def require_terminal(alternative: str) -> None:
    """Raise a ConfigurationError with the alternative command if no terminal can move its cursor."""
    if not all(file.isatty() for file in (sys.stdin, sys.stdout, sys.stderr)):  # Textual writes to stderr
        raise ConfigurationError(f"input, output and errors must be a terminal; without one, use `{alternative}`")
    if os.environ.get("TERM", "").lower() in ("", "dumb", "unknown"):
        raise ConfigurationError(f"this terminal cannot move its cursor (TERM); use `{alternative}`")


def open_console(file: IO[str] | None = None, *, wide: bool = False) -> Console:
    """Return a console on standard output or on a file. Rich reads NO_COLOR and FORCE_COLOR.

    A file, and a terminal with `wide`, gets lines of any length.
    """
    from rich.console import Console

    target = file if file is not None else sys.stdout
    width = None if target.isatty() and not wide else _UNLIMITED_WIDTH
    return Console(file=target, width=width, highlight=False, markup=False, emoji=False)


def show(console: Console, renderables: Iterable[RenderableType]) -> None:
    """Print in order. A file gets no blanks at the end of lines."""
    if console.is_terminal:
        for renderable in renderables:
            console.print(renderable)
        return
    with console.capture() as capture:
        for renderable in renderables:
            console.print(renderable)
    for line in capture.get().splitlines():
        console.file.write(line.rstrip() + "\n")


def table(title: str, columns: Sequence[tuple[str | Text, str]], rows: Iterable[Sequence[str | Text]]) -> Table:
    """Return a table without borders.

    Each column has a heading and `left`, `right`, `cut` or `wrap`. The last two are left and shrink first: `cut` ends
    with an ellipsis, `wrap` continues in the next line.
    """
    from rich.table import Table

    built = Table(
        title=title or None,
        title_justify="left",
        title_style="bold",
        box=None,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        show_header=any(heading for heading, _ in columns),
    )
    for heading, side in columns:
        # Rich shrinks columns that may wrap before it shrinks the others.
        built.add_column(heading, justify="right" if side == "right" else "left", no_wrap=side in ("left", "right"))
    for row in rows:
        cells = [plain(cell) if isinstance(cell, str) else cell for cell in row]
        for cell, (_, side) in zip(cells, columns, strict=True):
            cell.no_wrap, cell.overflow = (False, "fold") if side == "wrap" else (True, "ellipsis")
        built.add_row(*cells)
    return built


def plain(value: object, style: str = "") -> Text:
    """Return text from any source without markup and without control characters."""
    from rich.text import Text

    return Text("".join(c if c.isprintable() else "?" for c in str(value)), style=style)


def print_result(document: Any, shown: Iterable[RenderableType], *, as_json: bool) -> None:
    """Print a document as JSON, or what people see of it."""
    if as_json:
        print_json(document)
    else:
        show(open_console(), shown)


def print_json(document: Any, indent: int | None = 2) -> None:
    """Print a JSON document: ASCII, keys in the exporter's order; without `indent`, as one line."""
    print(json.dumps(document, indent=indent))
