"""The processes of `top`: the columns that fit on the screen, and a line for each row."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gpumem_client.wire.units import UNKNOWN, human_seconds, short_bytes
from gpumem_exporter.cli.render.terminal import plain
from gpumem_exporter.cli.top.cells import cell, line, width_of
from gpumem_exporter.cli.top.rows import SORTS, Row, descends
from gpumem_exporter.cli.top.view import View

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["process_lines"]

_NARROW = 100
"""Headings are short on a screen with fewer columns."""


@dataclass(frozen=True, slots=True)
class _Column:
    """One column. Columns without `after` are always shown."""

    name: str
    """The heading, and the name for `--sort`."""
    value: Callable[[Row], str]
    short: str = ""
    right: bool = False
    least: int = 0
    most: int = 1000
    style: str = ""
    """The style of the heading: the color of this memory in the bars."""
    after: int = 0
    """The column is shown only if the workload keeps this width."""
    sparse: bool = False
    """The column is shown only if a row has a value."""


def _text(name: str) -> Callable[[Row], str]:
    return lambda row: str(getattr(row, name) or UNKNOWN)


def _size(name: str) -> Callable[[Row], str]:
    return lambda row: short_bytes(getattr(row, name))


def _part(name: str) -> Callable[[Row], str]:
    """Return a function that shows a size that few processes have: blank for 0 and for an unknown size."""
    return lambda row: short_bytes(size) if (size := getattr(row, name)) else ""


def _age(row: Row) -> str:
    """The age of the last sample, at least 0.1 seconds."""
    age = row.sample_age_seconds
    return "silent" if row.state == "silent" else human_seconds(None if age is None else max(0.1, age))


def _workload(row: Row) -> str:
    """The workload; without one, the program in brackets."""
    return row.workload or (f"({row.command})" if row.command else UNKNOWN)


def _pod(row: Row) -> str:
    return "/".join(filter(None, (row.k8s_namespace, row.k8s_pod))) or UNKNOWN


_COLUMNS = (
    _Column("pid", lambda row: str(row.pid), right=True, least=5, most=12),
    _Column("gpu", _text("gpu"), least=3),
    _Column("workload", _workload, least=8),
    _Column("rank", _text("rank"), right=True),
    _Column("user", _text("user"), most=12, after=22),
    _Column("used", _size("used_bytes"), right=True, least=6),
    _Column("allocated", _size("allocated_bytes"), "alloc", right=True, least=6, style="green"),
    _Column("reserved", _size("reserved_bytes"), right=True, least=6, after=22),
    _Column("idle-cache", _size("idle_cache_bytes"), "idle", right=True, least=6, style="yellow"),
    _Column("reclaimable", _size("reclaimable_bytes"), "reclaim", right=True, least=6, after=14, style="yellow"),
    _Column("fragmented", _size("fragmented_bytes"), "frag", right=True, least=6, style="red"),
    _Column("non-torch", _size("non_torch_bytes"), right=True, least=6, style="blue"),
    _Column("NCCL", _part("nccl_bytes"), right=True, style="blue", after=14, sparse=True),
    _Column("unmapped", _part("unmapped_bytes"), right=True, sparse=True),
    _Column("age", _age, right=True, least=6, after=16),
    _Column("step", lambda row: UNKNOWN if row.step is None else str(row.step), right=True, after=24),
    _Column("state", _text("state"), least=10, after=24),
    _Column("command", _text("command"), most=40, after=26),
    _Column("pod", _pod, most=40, after=26),
)
"""From left to right."""
_OPTIONAL = ("reclaimable", "NCCL", "age", "reserved", "user", "command", "state", "step", "pod")
"""The optional columns, in the order in which a wider screen adds them."""


def process_lines(rows: Sequence[Row], shown: Sequence[Row], view: View, width: int) -> list[Text]:
    """Return the heading and a line for each shown row.

    All `rows` set the widths, so that the columns do not move while the list is scrolled or filtered.
    """
    short = width < _NARROW
    columns, widths = _fit(rows, width, short, view.sort)
    headings = [_heading(column, size, short, view) for column, size in zip(columns, widths, strict=True)]
    return [line(headings, width, gap=""), *(_line(row, columns, widths, width, view) for row in shown)]


def _fit(rows: Sequence[Row], width: int, short: bool, sort: str) -> tuple[list[_Column], list[int]]:
    """The columns for a width, and the width of each."""
    columns = [column for column in _COLUMNS if not column.sparse or any(map(column.value, rows))]
    natural = {
        column.name: width_of((_named(column, short), *map(column.value, rows)), column.least) for column in columns
    }
    if not short:
        # Space for the arrow, so that it does not join two headings.
        natural |= {c.name: max(natural[c.name], len(c.name) + 1) for c in columns if c.right and c.name in SORTS}
    if sum(natural.values()) + len(natural) <= width:
        return columns, [natural[column.name] for column in columns]
    natural = {column.name: min(natural[column.name], column.most) for column in columns}
    chosen = [column for column in columns if not column.after or column.name == sort]
    room = width - sum(natural[column.name] + 1 for column in chosen) + 1 + natural["workload"]
    for column in sorted((c for c in columns if c.name in _OPTIONAL), key=lambda c: _OPTIONAL.index(c.name)):
        name = column.name
        if column not in chosen and room - natural[name] - 1 >= min(column.after, natural["workload"]):
            chosen.append(column)
            room -= natural[name] + 1
    natural["workload"] = max(1, min(natural["workload"], room))
    chosen.sort(key=columns.index)
    return chosen, [natural[column.name] for column in chosen]


def _named(column: _Column, short: bool) -> str:
    return column.short if short and column.short else column.name


def _heading(column: _Column, size: int, short: bool, view: View) -> Text:
    """A heading and the gap after it. The heading of the sort column has an arrow."""
    style, mark = f"bold {column.style}".strip(), ""
    if column.name == view.sort:
        style = f"{style} underline"
        mark = "▼" if descends(view.sort, reverse=view.reverse) else "▲"
    named = plain(_named(column, short), style).append(mark, style="bold")
    return cell(cell(named, max(size, named.cell_len), right=column.right), size + 1)


def _line(row: Row, columns: Sequence[_Column], widths: Sequence[int], width: int, view: View) -> Text:
    styles = {"silent": "red", "reporting": ""}
    cells = [
        cell(
            column.value(row),
            size,
            right=column.right,
            style=styles.get(row.state or "", "dim" if column.name in ("workload", "state") else ""),
        )
        for column, size in zip(columns, widths, strict=True)
    ]
    drawn = line(cells, width)
    if row.identity == view.chosen:
        drawn = cell(drawn, width)
        drawn.stylize("reverse")
    return drawn
